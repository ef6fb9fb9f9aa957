"""Online learning: votes, experiences, guarded updates, gate and alarms of a model that learns from its traffic.

No HTTP, no Prefect, no MLflow: the server hands answers in, the worker takes them out of the buffer.
"""
