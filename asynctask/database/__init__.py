"""Access to each kind of database through SQLAlchemy, without knowledge of Tasks."""
