"""Servers for a team on one machine: `posttrain up`, `posttrain down`, `posttrain status`.

subreaper        wraps one server; its process tree ends with it, or with the supervisor (a script)
processes        identity of processes, search and termination of ours
ports            free ports and port holders
state            operations/state.json and the supervisor's lock
services         the servers: command, environment, health check
managed_service  lifecycle of one server: start, health checks, restart with exponential backoff
supervisor       all servers, until it is told to stop
database         PostgreSQL in place of sqlite files
registration     work pool, GPU limit, deployments, automations (a separate process)
automations      deployments/automations.yaml, applied by name
checks           checks of Prefect's address, profile and version; explanations of known errors
connect          discovery of running servers by `posttrain run` and other commands
report           output of `up` and `status`
commands         the three commands
"""
