"""Middleware: what wraps the pushing and the performing of a job."""
