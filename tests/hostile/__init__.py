"""Tables of hostile input: `test_hostile_input.py` runs each case."""
