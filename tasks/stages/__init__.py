"""The tasks of the pipeline, one stage each: read inputs and settings, call rl_core, track the results."""
