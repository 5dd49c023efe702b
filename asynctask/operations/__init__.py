"""What waits where, what runs, and what people do about it."""
