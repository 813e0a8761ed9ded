"""The run directory and its readers: its files, following, delivery, decisions about an existing run, removal.

Submitters, drivers and readers on different hosts share only the code of this package. It starts no process.
"""
