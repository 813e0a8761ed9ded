"""Hooks give Airflow and users' code access to rankzero's connections.

Each file holds one hook, a thin class over `airflow_rankzero.connection`. Code that reads or tests a connection belongs
there, and code that concerns a task belongs in the operator.
"""
