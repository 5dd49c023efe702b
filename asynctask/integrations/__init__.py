"""Tracking on other engines: one module for each, the only one that imports the engine."""
