"""The authenticated connection between the driver and its agents.

`frames` and the proof of the run's secret (`auth`) at the bottom; above them `session`, which outlives cut
connections; then `driver_end` and `agent_end`. Every bound is in `limits`. Nothing here knows what a rank or a result
is, and nothing here unpickles.
"""
