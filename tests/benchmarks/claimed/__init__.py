"""Claims of others, measured: tasks, arms, runs and tables of `tests/benchmarks/claims.py`."""
