"""What people get back: reports of a Task in their own columns, the original rows, empty sheets to fill in."""
