"""The tracker attached to other engines: one module each, the only one that imports the engine."""
