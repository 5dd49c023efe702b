"""Exports: a Task whose items are shards of rows, and a file that is merged of them when it closes."""
