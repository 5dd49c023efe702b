"""The ledger: the SQL side, the only truth about Tasks and jobs. Uses SQLAlchemy."""
