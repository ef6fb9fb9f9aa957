"""The training service above its engine (`rl_core/service/`).

store       durable state that server and worker share: requests, runs, samplers, checkpoints, sessions, keys, audit
worker      the process that computes: order, batches, snapshots, replay after a kill
commands    saving, loading and unloading as plain data, beside the engine's requests
"""
