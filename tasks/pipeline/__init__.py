"""Pipeline runs and the contract of a stage: key, folders, lock, resume, tracking."""
