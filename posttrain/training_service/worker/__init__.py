"""Worker of the training service: the process that owns the engine and computes.

engine_process     process loop, shutdown by signals, housekeeping
fair_rounds        the requests of a round, and each owner's part of it
request_execution  engine calls and their answers
loaded_runs        runs in memory: snapshots, replay, eviction
loaded_samplers    samplers in memory
saved_weights      saved paths, and the parts shared by all modules
run_tracking       metrics, MLflow runs, and registration of saved paths
"""
