"""HTTP server of the training service: the clients' routes and its own, over the store; it never loads a model."""
