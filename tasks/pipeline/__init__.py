"""The run of a pipeline and the contract of its stages: key, folders, lock, resume, tracking."""
