"""What a team on one machine needs: `posttrain up`, `posttrain down`, `posttrain status`.

keeper        wraps one server: its whole tree of processes ends with it, or with the supervisor (a script)
processes     who a process is, which ones are ours, ending them
ports         is a port free, and who has it
state         what is written down: operations/state.json and the supervisor's lock
services      the servers: command, environment, health
supervised    one of them over time: started, watched, restarted with back-off
supervisor    all of them, until it is told to stop
database      PostgreSQL in place of sqlite files
registration  work pool, GPU limit, deployments, automations (a process of its own)
automations   deployments/automations.yaml, applied by name
checks        Prefect's address, profile and version, and what went wrong in words
connect       how `posttrain run` and its kin find the servers that are up
commands      the three commands
"""
