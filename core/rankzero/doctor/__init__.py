"""Finds problems that would stop a training on an engine before it starts, and names a fix for each.

`examine` checks everything that can be checked without starting a process, and runs `probe`, a training that examines
the machines of its ranks. `findings` judges both with pure functions. The probe is launched like any other training, so
it meets the same problems.
"""
