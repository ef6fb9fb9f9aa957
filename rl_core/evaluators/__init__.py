"""Other people's evaluators: tasks of lm-eval and inspect-ai, run on this project's models."""
