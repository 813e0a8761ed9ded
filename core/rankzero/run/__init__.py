"""The run directory and whoever reads it: what lies where, following, delivery, what an existing run means, removal.

A submitter, a driver and a reader on another host meet only here. Nothing in here starts a process.
"""
