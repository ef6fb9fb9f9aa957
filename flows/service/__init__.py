"""Training service above the engine: HTTP server, durable store, engine process."""
