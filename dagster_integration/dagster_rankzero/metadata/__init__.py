"""Metadata of a training in Dagster's UI: entries at its end, its curve, and observations while it runs.

Modules here read runs and results and decide nothing.
"""
