"""Storage on disk: atomically published folders, locks, checkpoints, the state codec, fault points for tests."""
