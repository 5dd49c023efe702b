__version__ = "0.1.0"

DISTRIBUTION = "asynctask-ledger"
"""What pip knows this package as: the package index has an ``asynctask`` that is another project's."""
