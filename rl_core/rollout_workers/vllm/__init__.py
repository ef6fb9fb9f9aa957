"""Programs of vLLM's environment, which holds nothing of posttrain: the start command, and methods of its workers.

`start.py` runs as a file; vLLM imports `posttrain_worker` from this folder.
"""
