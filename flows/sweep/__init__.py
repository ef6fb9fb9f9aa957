"""Sweeps: trials of one pipeline that differ in some settings and seeds, and share every stage that does not change.

space    settings that vary: lists, ranges, their grid
search   the next configuration: grid, random, Bayesian, successive halving
plan     a sweep's description, and the settings of one trial
record   the sweep's folder: what was asked, what came of it
trial    one trial, in this process
worker   the process that runs trials, one after another
pool     worker processes, and the memory that they may take
choice   the winner, measured again on fresh held-out episodes
report   table, CSV, JSON, figure
conduct  the flow: everything in its order
"""
