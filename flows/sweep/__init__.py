"""Sweeps: trials of one pipeline that differ in some settings and seeds, and share all unchanged stages.

search         varied settings, and the next configuration: grid, random, Bayesian, successive halving
plan           description of a sweep, and the settings of one trial
schedule       the sweep's folder, and the order of the trials
trial          one trial, in this process
worker         program of a process that runs trials, one after another
trial_process  worker processes on this machine, and their memory
ray_trials     worker processes on the nodes of a Ray cluster
winner         ranking, and the winner's figures on fresh held-out episodes
report         table, CSV, JSON, figure
sweep_flow     the flow
"""
