"""Crash test: a small pipeline is killed at every fault point and at random times, resumed, and compared.

pipelines   settings of the small pipeline, and the commands that run it
forks       warm process that forks a child for each run
content     comparable content of an output folder, and leftovers
trials      kills, restarts, comparison
jobs        trials distributed over several processes
report      figures as JSON and Markdown
servers     Prefect server and environment of the runs
service     the same for a training service: its worker and its clients

`python -m crash --help` (in tests/), `make crash-test`.
"""
