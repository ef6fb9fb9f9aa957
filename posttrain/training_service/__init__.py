"""Training service above the engine: HTTP server, durable store, engine process.

wire        bodies of the clients' requests as the engine's requests, its answers as bodies
store       durable state that server and worker share: requests, runs, samplers, checkpoints, sessions, keys, audit
worker      the process that computes: order, batches, snapshots, replay after a kill
commands    saving, loading and unloading as plain data, beside the engine's requests
"""
