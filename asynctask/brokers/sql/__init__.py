"""The broker that is a table of the ledger's database: nothing else to install."""
