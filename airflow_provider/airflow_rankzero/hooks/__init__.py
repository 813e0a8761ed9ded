"""Hooks give Airflow and users' code access to rankzero's connections; each file holds one hook."""
