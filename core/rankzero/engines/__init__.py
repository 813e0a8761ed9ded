"""Engines start agents: as processes of this machine (`local`), or as tasks of a Spark cluster (`spark`, `connect`).

An engine is a frozen description; `Engine.open` makes the session that a driver uses. An engine knows nothing of
ranks, results or attempts, and the driver knows nothing of Spark.
"""
