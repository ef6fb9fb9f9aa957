"""Reference models: a cache of frozen models, in few bits where that is asked for, that score token rows."""
