"""Brokers hold waiting jobs. ``base`` is the contract, the other modules are the implementations."""
