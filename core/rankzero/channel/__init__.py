"""The authenticated connection between the driver and its agents.

`frames` and the proof of the run's secret (`auth`) at the bottom; above them `session`, which
outlives cut connections; then the driver's end (`server`, `listen`, `connection`, `peer`,
`server_files`) and the agent's end (`client`, `exchange`, `keeper`, `dial`, `client_files`). Every
bound is in `limits`. Nothing here knows what a rank or a result is, and nothing here unpickles.
"""
