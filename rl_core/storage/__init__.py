"""Folders, locks, checkpoints and the state codec: everything that rl_core reads and writes, atomically."""
