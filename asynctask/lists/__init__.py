"""Lists: reading, validating and splitting them into jobs."""
