"""Crash test: a small pipeline is killed at every fault point and at random times, goes on, and is compared.

pipelines   the settings of the small pipeline, and which commands run it
forks       a warm process that forks a child for each run
content     what a run left, in a form that equal runs share
trials      kills, restarts, comparison
report      figures as JSON and Markdown
service     the same for a training service: its worker and its clients

`python -m crash --help` (in tests/), `make crash-test`.
"""
