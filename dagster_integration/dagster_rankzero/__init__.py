"""Dagster integration (in progress)."""
