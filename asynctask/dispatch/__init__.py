"""From the ledger to the broker: the demand, the leader, and jobs on their way."""
