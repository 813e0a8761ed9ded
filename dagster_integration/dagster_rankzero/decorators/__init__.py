"""Functions that become assets and ops: one decorator in each file, and what they share.

`compute` makes the step's function, `check_specs` turns reports into check results. May not live here: how a training
is run, which is the resource's. Only components build on this.
"""
