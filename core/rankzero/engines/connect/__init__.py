"""The Spark Connect engine: a barrier stage on a cluster that is reached by one gRPC address, without a local JVM.

Its tasks run `rankzero.engines.spark.stage` on the executors, like those of a classic session. All launches of a user
share a session of the server: docs/architecture.md#one-shared-session-of-spark-connect.

A run that outlives its caller is driven in its own stage, if its directory is a path. The submitter's process starts
the stage and writes no status, and task 0 starts the driver beside its agent: `Driver` itself, on the engine of
`rankzero.engines.connect.stage`. The process that claims the submission drives the run. If the stage fails before its
driver has claimed it, since a task does not see the directory or no driver can listen there, the submitter does. After
that it only keeps the connection of the stage. Attempts restart within the stage; a stage that is lost is a lost run,
which the next submission resumes.

Driver and tasks exchange files in a folder of the submission, each written once (`rankzero.task.stage`). The function
of the tasks carries the user's environment and the secret of the stage. The file of an attempt holds the secret of its
channel, encrypted by a pad that is computed from the secret of the stage and the number of the attempt.
"""
