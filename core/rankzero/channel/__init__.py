"""The authenticated connection between the driver and its agents.

Frames (`frames`), the proof of the run's secret (`auth`), the driver's end (`server`) and the
agent's end (`client`). Nothing here knows what a rank or a result is, and nothing here unpickles.
"""
