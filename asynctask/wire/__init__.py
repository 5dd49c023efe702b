"""Sidekiq's wire format as plain values: what a job looks like in Redis, byte for byte, without any connection."""
