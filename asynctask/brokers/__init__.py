"""Brokers: where jobs wait. ``base`` says what one must guarantee, the other modules are the implementations."""
