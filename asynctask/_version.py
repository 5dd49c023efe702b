__version__ = "0.1.0"

DISTRIBUTION = "asynctask-ledger"
"""Name of the distribution; ``asynctask`` on the package index is another project."""
