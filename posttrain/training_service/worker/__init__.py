"""The engine process of the training service.

engine_process   the loop, and its end by signals
rounds           choice of what is computed together
computing        one round: engine calls and their answers
live_runs        runs in memory: snapshots, replay, eviction
live_samplers    samplers in memory
weights_on_disk  saved paths
service_folder   names of files and folders
saved_versions   saved paths as versions of the model registry
upkeep           expiry, between rounds
worker_parts     engine, store, folder and saved weights, which all of them share
"""
