"""The ledger: the SQL side, and the only truth about what happened. SQLAlchemy lives here."""
