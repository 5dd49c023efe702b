"""From the ledger to foreign queues: the demand, the dispatcher, and jobs on their way."""
