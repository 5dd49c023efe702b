"""Sidekiq's wire format as plain values, byte for byte, without a connection."""
