"""Prefect flows and the `posttrain` command."""
