"""From the ledger to the broker: how many jobs are wanted, which process leads, and what is on its way."""
