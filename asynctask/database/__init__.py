"""How each kind of database is talked to; nothing here knows about Tasks. SQLAlchemy lives here."""
