"""Reference models: a cache of frozen, optionally quantized models that score token rows."""
