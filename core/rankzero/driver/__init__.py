"""The driver opens an engine, decides about attempts, and writes the outcome, in the caller's process or its own.

Code that ranks, agents or readers need belongs in other packages. `attempt` is the life of one attempt, `driver` makes
one after the other; what `ending` decides are pure functions. All ranks are ended between two attempts; a usable engine
session is kept, a dead JVM is replaced. Before each attempt the driver polls the slots of its engine, and
`places.tasks_to_start` decides whether it starts, and with how many tasks; engines only count and start. The driver's
own thread never waits for a store: the status, lines, checkpoints and requests to cancel have their own threads, so a
request of 20 s delays neither a failure nor a hang. A full disk ends no run: lines are counted as lost, and the status
is written again for minutes.
"""
