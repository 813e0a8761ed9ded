"""The warm server is a process beside the executor that has imported torch and forks agents. It runs no user code.

Starts are serialized by a lock in a private directory, and files of a killed server are removed when the next one
starts. Variables of caches, such as ``TORCH_HOME``, are set after the fork, so a job with its own cache for each run
needs one server. Short-lived executors of one machine can share a server: ``RANKZERO_WARM_OWNER`` is then the id of a
process of this user that outlives them. Why there is such a server:
docs/architecture.md#ranks-are-forks-of-a-warm-server.
"""
