"""Access to each kind of database, without knowledge of Tasks. Uses SQLAlchemy."""
