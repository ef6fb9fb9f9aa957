"""Parts of tests/benchmarks/scale.py: the task, the runs, the kills, the simulation's validation, the pictures."""
