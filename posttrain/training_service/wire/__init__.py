"""Messages of the training service's clients: bodies of requests to the engine's requests, its answers to bodies."""
