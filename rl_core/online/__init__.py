"""Online learning: votes, experiences, guarded updates, gate and alarms of a model that learns from its traffic.

No HTTP, Prefect or MLflow: the server passes answers in, and the worker reads them from the buffer.
"""
