"""Hooks: what Airflow and users' own code ask for a connection of ours.

Lives here: one file for each hook, a thin class over `airflow_rankzero.connection`. May not live here: how a connection
is read or tested, which needs no hook, and anything about a task.
"""
