"""Parts of compare_trl.py, in TRL's Python.

bench           weights, rows and pairs that every comparison uses; a line of the table
pairs_and_rows  SFT, reward model, DPO and its relatives
group_relative  GRPO and its relatives, with equal and with different meaning on both sides
"""
