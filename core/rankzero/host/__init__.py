"""Queries about the machine that a process runs on: processes and their descendants, forks, addresses.

Modules here import only the standard library and know nothing of runs. Nothing is found by name: agents and zygotes
are child subreapers. Each process of rankzero starts with an empty signal mask, default dispositions and its own
descriptors (`processes.settle_signals`).
"""
