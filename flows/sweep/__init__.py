"""Sweeps: trials of one pipeline that differ in some settings and seeds, and share every stage that does not change.

space         settings that vary: lists, ranges, their grid
search        the next configuration: grid, random, Bayesian, successive halving
plan          a sweep's description, and the settings of one trial
record        the sweep's folder: what was asked, what came of it
schedule      order of the trials
trial         one trial, in this process
worker        the process that runs trials, one after another
pool          worker processes, and the memory that they may take
winner        ranking, and the winner's figures on fresh held-out episodes
confirm       the finalists play them
sweep_report  table, CSV, JSON, figure
conduct       the flow: everything in its order
"""
