"""One stage of a pipeline each: load settings, call rl_core, track."""
