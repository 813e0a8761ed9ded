"""The driver: opens an engine, decides about attempts, writes the outcome. In the caller's process or in its own.

What ranks, agents or readers need lives elsewhere; decisions are pure functions in `policy` and `verdict`.
"""
