"""Prefect flows, and what they need of Prefect."""
