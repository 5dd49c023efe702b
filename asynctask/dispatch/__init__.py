"""Dispatch of jobs from the ledger to foreign queues: the demand, the dispatcher, and its outbox."""
