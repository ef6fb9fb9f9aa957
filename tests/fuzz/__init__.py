"""Fuzzing of what reads input: `make fuzz` for minutes, `tests/test_fuzz.py` for seconds."""
