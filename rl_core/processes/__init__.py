"""Child processes: start, stop, end with their parent; pools that answer messages; supervision with restarts."""
