"""Bulk work: reading lists, splitting them into jobs, dispatching, reporting."""
