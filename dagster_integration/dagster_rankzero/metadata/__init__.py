"""What Dagster's UI shows of a training: the entries of its end, its curve, and observations meanwhile.

May not live here: anything that decides; runs and results are only read.
"""
