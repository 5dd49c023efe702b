"""From the ledger to the broker: how many jobs are wanted, whose turn it is, and what is on its way."""
