"""Presentation of runs: `summary` reduces events, `page` draws the report, `card` and `curves` the rest.

This package reads run directories through `rankzero.RunHandle` and writes nothing into them.
"""
