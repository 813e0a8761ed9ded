"""Airflow provider (in progress)."""
