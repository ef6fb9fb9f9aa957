"""Servers for a team on one machine: `posttrain up`, `posttrain down`, `posttrain status`.

commands         the three commands
supervisor       starts all servers, keeps them up, and stops them in order
managed_service  lifecycle of one server: start, health checks, restart; orderly stop of several
services         specification of each server: command, environment, health check
inference_server vLLM as one of the servers
state            operations/state.json and the supervisor's lock
processes        ports, process identity, search and termination of the servers' processes
database         PostgreSQL instead of sqlite files
registration     work pool, GPU limit, deployments, automations (a separate process)
automations      deployments/automations.yaml, applied by name
connection       discovery of running servers by other commands; checks of addresses and versions; status output
"""
