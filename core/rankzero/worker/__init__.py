"""One rank's process: it sets up environment and rendezvous, calls the user's code, and reports to its agent.

Modules here import only the standard library, torch, and what pyspark bundles. A worker sends ``returned`` when the
user's code has returned, and ``commit`` when its value is written; it then waits until all ranks have committed
(docs/architecture.md#the-result-is-a-committed-record). A rank whose ``returned`` arrives after it was asked to stop
counts as a secondary failure. The log of a rank names exit handlers that are cut off after ``exit_timeout``. A hanging
rank writes its stacks and what torch's flight recorder has to its log; ``TORCH_FR_BUFFER_SIZE`` makes torch record.
"""
