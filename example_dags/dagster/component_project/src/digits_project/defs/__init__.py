"""Definitions of the project: a file or a folder for each."""
