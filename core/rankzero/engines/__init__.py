"""Where agents are placed: processes of this machine (`local`), a Spark cluster (`spark`).

An engine is a frozen description; `Engine.open` makes the session that a driver uses. An engine
knows nothing of ranks, results or attempts, and the driver knows nothing of Spark.
"""
