"""Existing engines with the tracker attached: one module each, the only place where that engine is imported."""
