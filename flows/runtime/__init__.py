"""Execution of a flow: Prefect's settings, progress, summary, stop signals, approval wait."""
