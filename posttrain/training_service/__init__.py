"""Training service: an HTTP server, a durable store and a worker process around the training engine.

http        HTTP routes over the store
wire        translation between request bodies and engine requests, results and response bodies
store       durable state shared by server and worker: requests, runs, samplers, checkpoints, sessions, keys, audit
worker      process that computes: ordering, batching, snapshots, replay after a crash
commands    requests for saving, loading and unloading, in addition to the engine's requests
"""
