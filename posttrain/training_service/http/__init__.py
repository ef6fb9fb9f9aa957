"""HTTP server of the training service: client and management routes over the store. It never loads a model."""
