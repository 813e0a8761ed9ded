"""Finds problems that would stop a training on an engine before it starts, and names a fix for each.

`examine` checks everything that can be checked without starting a process, and runs a training that examines the
machines of its ranks. The training is launched like any other, so it meets the same problems.
"""
