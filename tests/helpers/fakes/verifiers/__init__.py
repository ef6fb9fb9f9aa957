"""The package root is empty, as in version 0.4."""
