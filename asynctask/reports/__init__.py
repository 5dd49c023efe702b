"""Reports of a Task in the user's own columns, and templates of sheets."""
