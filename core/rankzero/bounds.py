"""Time limits in seconds, by the process in which they hold, and sizes that several modules share.

Limits of different processes hold in relation to each other; `tests/test_bounds.py` has these relations. A size that
one module uses is defined there. Modules read a limit when they use it, so tests may change it. This module imports
nothing, since every process loads it.
"""

from __future__ import annotations

STOP_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when a run fails or is cancelled, unless the job has another value."""

EXIT_TIMEOUT = 5.0
"""Seconds that exit handlers and threads of a rank get after it has returned, unless the job has another value."""

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats in ``status.json``."""

DRIVER_DEAD_AFTER = 15.0
"""Seconds without a heartbeat after which a driver counts as dead; more if its heartbeat interval is longer."""

DRIVER_STALE_AFTER = 120.0
"""Seconds without a heartbeat after which a driver in a thread counts as dead although its process is alive, on systems
that cannot be queried for threads (macOS)."""

CLOCK_SKEW = 300.0
"""Most seconds by which the clocks of two hosts may differ."""

STORE_OUTAGE = 300.0
"""Seconds of retries while the store fails at the end of a training: its result is worth more than the wait."""

LOG_TAIL = 20
"""Last log lines of a rank that are kept for an error message."""

LOG_TAIL_WIDTH = 2000
"""Characters to which each of these lines is cut."""

CANCEL_TIMEOUT = 30.0
"""Seconds to wait for the end of a cancelled run, in addition to its ``stop_grace``. Its driver may need 28 s of them,
if neither the agents nor the engine reply."""

RETURNED_NOTICE = 30.0
"""Seconds without progress, after some ranks have returned, until a log line says what the others are doing."""

RETURNED_HANG = 300.0
"""Seconds that ranks may wait in a collective for ranks that have returned, whatever ``hang_timeout`` is."""

MEET_TIMEOUT = 30.0
"""Seconds for a rank to connect to rank 0's rendezvous."""

VALUE_LIMIT = 16 << 20
"""Bytes of a result that an orchestrator's metadata database gets where its other tasks are mapped over the items."""

UNFINISHED_AFTER = 3600.0
"""Seconds since its last change after which a temporary file counts as left by a killed process."""


# The channel: its two ends, in agents and the driver.

PING_INTERVAL = 1.0
"""Longest time between two frames of each end, which also report how many frames have arrived."""

CONNECTION_SILENCE = 5.0
"""Time without a frame after which a connection is broken; the agent then makes a new one immediately."""

CONNECTION_LOST_AFTER = 15.0
"""Time without a frame after which the other end is lost for good."""

AGENT_CONNECT_TIMEOUT = 20.0
"""Time from its start that an agent has to find a driver that proves the secret, unless it was given another."""

CONNECT_TRY_TIMEOUT = 2.0
"""Time for one connection to be made, on the agent's side."""

HANDSHAKE_REPLY_TIMEOUT = 5.0
"""Time for the handshake, on the agent's side. It is long because a driver serves agents that connect together one
after the other, and agents that give up and come again would only lengthen the queue."""

CONNECT_PAUSE_MIN = 0.1
"""First pause between two tries to connect; each pause is twice as long as the one before."""

CONNECT_PAUSE_MAX = 1.0
"""Longest pause between two tries; after a connection that lived longer, the first try has no pause."""

HANDSHAKE_TIMEOUT = 10.0
"""Time that a new connection has to prove the secret to the driver."""

UNPROVED_GRACE = 1.0
"""Age before which an unproved connection is not closed for a new one, because many agents may connect together; new
ones wait in the listener's queue meanwhile."""

ACCEPT_RETRY_INTERVAL = 0.1
"""Pause before the next accept when the process has no descriptor left."""

BULK_POLL_INTERVAL = 0.05
"""Time between two checks whether a busy driver can take more bulk."""

DISCONNECT_TIMEOUT = 1.0
"""Time that agents have to receive the server's disconnect when it closes."""

CHANNEL_CLOSE_TIMEOUT = 5.0
"""Time that the server's thread has to end."""

CHANNEL_JOIN_MARGIN = 0.5
"""Time beyond its timeout that an agent's `close` waits for the thread, which may hang in a name lookup."""

CERTIFICATE_TIMEOUT = 30.0
"""Seconds for the openssl command."""

REDRAW_INTERVAL = 10.0
"""Seconds in which one redraw of a progress bar becomes a line: an hour of two ranks is less than 1000 lines."""

DELIVERY_INTERVAL = 0.5
"""Seconds between two deliveries of messages that may wait: metrics, and the lines of a rank that prints little."""

# An agent.

FLUSH_TIMEOUT = 0.1
"""Seconds for ranks to send the reports that they hold before they are stopped; one in native code may not answer."""

WORKER_EXIT_MARGIN = 1.0
"""Seconds after ``exit_timeout`` in which workers exit by themselves and log which exit handlers they cut off."""

LAST_LINES_STALL_TIMEOUT = 15.0
"""Seconds, after a success, without any line accepted by the driver; the remaining lines are then dropped."""

LAST_LINES_TIMEOUT = 600.0
"""Seconds to deliver all last lines after a success."""

STOPPED_LINES_TIMEOUT = 1.5
"""Seconds to deliver the last lines after a failure or a cancel."""

LAST_LINES_POLL_INTERVAL = 0.001
"""Seconds until the first poll whether the driver has accepted the last lines; the interval doubles."""

PUMP_INTERVAL = 0.05
"""Seconds between two attempts to send what waits: spooled lines to the driver, messages to a worker."""

STACKS_TIMEOUT = 1.0
"""Seconds that the workers get to write their stacks."""

CUT_OFF_GRACE = 5.0
"""Seconds to exit for a rank that closed its connection to the agent before it finished."""

# The driver.

STORE_RETRY_INTERVAL = 1.0
"""Seconds between two requests to a store that fails."""

CHECKPOINT_COMMIT_TIMEOUT = 600.0
"""Seconds that a run waits at its end for checkpoints that are still being stored."""

REFUSAL_PAUSE = 300.0
"""Seconds for which a rank sends its checkpoints to the driver after the object store has refused one of them."""

CHECKPOINT_RETRY_TIMEOUT = 30.0
"""Seconds for which the commit of the newest checkpoint is retried while the store refuses it."""

CHECKPOINT_RETRY_INTERVAL = 0.5
"""Seconds between two tries to commit a checkpoint."""

STAGE_END_TIMEOUT = 5.0
"""Seconds for a stage to end after its driver has exited; then it is cancelled. The connection may be broken."""

CAUSE_WINDOW = 0.8
"""Seconds to wait for the true cause when the first failure looks like a consequence of another."""

AGENT_LOST_WINDOW = 2.0
"""Seconds to wait for the engine's own explanation when an agent's connection ended."""

OWNER_POLL_INTERVAL = 1.0
"""Seconds between two polls of an owner that has no pidfd."""

SESSION_CLOSE_TIMEOUT = 10.0
"""Seconds for an engine session to close (a SparkContext to stop)."""

SLOTS_POLL_INTERVAL = 0.1
"""Seconds between two polls of the number of slots of a cluster."""

STOP_MARGIN = 2.0
"""Seconds beyond the grace after which agents that do not disconnect are cancelled at the engine. The engine has as
long for that."""

SUCCESS_END_TIMEOUT = 25.0
"""Seconds without a message after which agents are cancelled once the run has succeeded: until then they run exit
handlers, and deliver log lines that still wait."""

STACKS_WINDOW = 3.0
"""Seconds to wait for the ranks' stacks once a run counts as hung."""

RESTART_PAUSE_MAX = 60.0
"""Longest pause in seconds before a restart."""

AGENT_CONNECT_TIMEOUT_MIN = 1.0
"""Seconds that an agent has at least to find its driver."""

GROWTH_TIMEOUT = 30.0
"""Seconds without a new slot after which an elastic attempt starts with the slots that exist. As long as torchrun's
rendezvous waits for more nodes. A quarter of ``start_timeout`` where that is less."""

WAITING_INTERVAL = 30.0
"""Seconds between two messages about what an attempt waits for."""

LAST_LINES_RETRY_INTERVAL = 0.5
"""Seconds between two tries to write the last lines to an object store."""

REPORT_INTERVAL = 30.0
"""Least seconds between two reports of a running run."""

REPORT_TIMEOUT = 10.0
"""Seconds for the last report. A run that has ended then removes the old report, rather than show an outdated one."""

HEARTBEAT_DELAY = 1.0
"""Seconds by which a heartbeat to an object store is delayed, so that the write of lines usually carries it."""

OUTCOME_RETRY_INTERVAL = 0.25
"""Seconds between two tries to write a status whose outcome is certain."""

RESULT_RETRY_INTERVAL = 0.5
"""Seconds between two tries to store a result."""

TRACKER_POLL_INTERVAL = 1.0
"""Seconds between two polls of the events for a tracker; on an object store at least as many as its readers wait. The
first poll waits, too, so that a tracker's imports do not slow down the start of the ranks."""

TRACKER_PAUSE_MAX = 60.0
"""Most seconds until a tracker that keeps failing is called again: the pause doubles with each failure."""

TRACKERS_TIMEOUT = 10.0
"""Seconds that all trackers together have after the end of a run."""

TICK = 0.1
"""Seconds between two checks of deadlines and of the request to cancel."""

LEASE_POLL_INTERVAL_MAX = 30.0
"""Most seconds between two reads of a lease on an object store, since it may have been shortened."""

CANCEL_REQUEST_TIMEOUT = 1.0
"""Seconds for an object store to answer whether the end that a signal asks for was requested by a user."""

# Every process: its host.

KILL_TIMEOUT = 5.0
"""Seconds to wait for a process to exit after SIGKILL; one that is stuck in the kernel does not."""

CLEANERS_TIMEOUT = 1.0
"""Seconds for processes to remove the shared memory of killed ranks."""

REAP_INTERVAL = 0.01
"""Seconds between two polls whether killed processes have exited."""

CONNECT_HEAD_START = 0.25
"""Seconds by which a host is tried before the next one, so that earlier ones are preferred."""

USAGE_FIRST_SAMPLE = 1.0
"""Seconds until the first sample of a host."""

USAGE_INTERVAL_MIN = 5.0
USAGE_INTERVAL_MAX = 60.0
"""Least and most seconds between two samples of a host, which are a hundredth of the time that the ranks have run."""

# Every process: an object store.

S3_REQUEST_TIMEOUT = 60.0
"""Seconds without a byte after which a request to S3 fails; the same as boto3's, since pyarrow's 3 are too few."""

S3_CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to S3 to be made."""

# A rank.

FORK_TIMEOUT = 30.0
"""Seconds for which a fork waits for an import, or a request to an object store, of another thread of rankzero."""

READ_AHEAD_POLL_INTERVAL = 0.5
"""Seconds after which a producer with a full queue checks whether its consumer has stopped."""

READ_AHEAD_EXIT_TIMEOUT = 5.0
"""Seconds for which a process that exits waits for a piece that is being read."""

DECODE_LOCK_TIMEOUT = 120.0
"""Seconds for which a rank waits for a group that another rank decodes; then it decodes the group, too."""

DECODE_LOCK_INTERVAL = 0.02
"""Seconds between two tries to lock a group."""

QUEUE_POLL_INTERVAL = 0.1
"""Seconds between two polls for room in the queue of a rank's messages to its agent."""

# Readers: reports, cards, the command line and trackers.

CARD_INTERVAL = 1.0
"""Seconds between two updates of a card."""

CARD_LAST_TIMEOUT = 10.0
"""Seconds that the last update of a card may take after the end of its run."""

BROWSER_REQUEST_TIMEOUT = 30.0
"""Seconds for a browser to send its request to `rankzero serve`."""

CLI_POLL_INTERVAL = 0.5
"""Seconds between two queries of the status of the run that `rankzero run` follows."""

WATCH_INTERVAL = 2.0
"""Seconds between two listings of a store with ``--watch``."""

EXPORT_TIMEOUT = 5.0
"""Seconds for one request to the collector of OpenTelemetry."""

EXPORT_INTERVAL = 60.0
"""Seconds between two exports of metrics to OpenTelemetry while a run lives."""

WANDB_POLL_INTERVAL = 0.02
"""Seconds between two looks whether W&B's service has written the end of an offline run."""

TRACKER_UPLOAD_INTERVAL = 60.0
"""Shortest time in seconds between two uploads to an object store, where nothing can be appended."""

# A warm server.

WARM_IDLE_TIMEOUT = 300.0
"""Seconds without an agent after which a warm server exits."""

WARM_CHORE_AFTER = 0.5
"""Seconds without a request after which a warm server does chores that make later ones cheaper."""

WARM_LOAD_AFTER = 5.0
"""Seconds after a request when a warm server loads the rest although agents run: else each rank of a restart would."""

WARM_OWNERLESS_MARGIN = 15.0
"""Seconds, after their grace, until agents are killed whose warm server has lost its owner."""

WARM_OWNER_POLL_INTERVAL = 0.5
"""Seconds between two polls whether the owner of a warm server is alive, during an import."""

WARM_REQUEST_TIMEOUT = 5.0
"""Seconds for a client of a warm server to send its request once it has connected."""

# Engines, in the driver.

ENGINE_ERROR_TIMEOUT = 10.0
"""Seconds to get the text of an engine's error."""

GPU_LISTING_TIMEOUT = 60.0
"""Seconds for ``nvidia-smi``, or for torch in an interpreter of its own, to list the GPUs."""

CONNECT_SERVER_TIMEOUT = 10.0
"""Seconds for a Spark Connect server to accept a TCP connection."""

CONNECT_SERVER_POLL_INTERVAL = 0.5
"""Seconds between two tries to reach a Spark Connect server that is starting."""

CONNECT_SESSION_WINDOW = 1800.0
"""Seconds for which launches share a session of a Spark Connect server: less than the hour for which it keeps an unused
one."""

CONNECT_DRIVER_TIMEOUT = 20.0
"""Seconds for an agent on Spark Connect to reach the driver, which runs before any agent. Less than for a classic
driver, because executors may have no route to a client's host at all."""

ENDED_POLL_INTERVAL = 0.05
"""Seconds between two listings of a stage's folder for the ends of agents, by the driver in that stage."""

DATAFRAME_PROGRESS_INTERVAL = 10.0
"""Seconds between two lines about a DataFrame that Spark is computing."""

DATAFRAME_POLL_INTERVAL = 0.1
"""Seconds between two polls of a DataFrame that Spark is computing."""

ARCHIVE_TIMEOUT = 180.0
"""Seconds for an archive of Spark's classes to be made, on a machine that is busy."""

KUBERNETES_REQUEST_TIMEOUT = 30.0
"""Seconds for one request to the API server of Kubernetes."""

SPARK_SUBMIT_TIMEOUT = 180.0
"""Seconds for ``spark-submit`` to start a JVM, upload the files and get the driver accepted."""

SPARK_SUBMIT_POLL_INTERVAL = 0.5
"""Seconds between two polls whether the driver has begun that ``spark-submit`` submitted."""

# The doctor.

DOCTOR_CONNECT_TIMEOUT = 3.0
"""Seconds for one address of a Spark master to be resolved and to accept a connection."""

DOCTOR_STORE_TIMEOUT = 15.0
"""Seconds for an object store to accept and delete an empty object; its client may retry for minutes."""

DOCTOR_CALL_TIMEOUT = 2.0
"""Seconds for one address of a rank to accept a connection."""

DOCTOR_DRIVER_TIMEOUT = 15.0
"""Seconds for the driver of the examination's run to write its last files, before the run is removed."""

DOCTOR_HANG_TIMEOUT = 60.0
"""Seconds without progress after which the examination's ranks count as hung; short, since a user waits for them."""

SKEW_WARNING = 5.0
"""Seconds between two clocks above which logs and metrics of several hosts are hard to compare."""

PROBE_CALL_TIMEOUT = 5.0
"""Seconds within which the examining process must connect to a rank."""

# A rank: what training code calls.

PART_UPLOAD_TIMEOUT = 30.0
"""Seconds from the first failed write of a checkpoint's part to the store until the rank gives up retrying."""

PART_RETRY_INTERVAL = 0.5
"""Seconds between two writes of a checkpoint's part to a store that has failed."""

PROGRESS_LINE_INTERVAL = 5.0
"""Seconds between two progress lines in a log."""

PROGRESS_REDRAW_INTERVAL = 0.2
"""Seconds between two updates of the progress line in a terminal."""

CHECKPOINT_SETTLE_TIMEOUT = 600.0
"""Seconds that a rank waits for the commit of a checkpoint: as long as a driver waits for the store when a run ends."""

# Users' tests: ranks of `run_inline`.

INLINE_PEER_TIMEOUT = 60.0
"""Seconds that the other ranks of `run_inline` may take to end after rank 0."""

INLINE_POLL_INTERVAL = 0.1
"""Seconds between two polls of the other ranks of `run_inline` while rank 0 trains."""

INLINE_ARRIVAL_TIMEOUT = 0.5
"""Seconds in which rank 0 of `run_inline` connects to the rendezvous store after it has read the store's address."""

INLINE_COMMIT_TIMEOUT = 60.0
"""Seconds that the commit of the last checkpoint of `run_inline` may take."""

INLINE_EXIT_TIMEOUT = 30.0
"""Seconds that the exit handlers of a rank of `run_inline` with its own process may take."""

# A submitter.

OWNER_LEASE = 20.0
"""Seconds that a driver on the cluster continues without its run's owner process: less than `CANCEL_TIMEOUT`."""

CLAIM_TIMEOUT = 20.0
"""Seconds until another submitter that claimed a run without writing ``job.json`` counts as dead; longer for a
submitter that has itself needed longer to write its files."""

SUBMIT_POLL_INTERVAL = 0.05
"""Seconds between two polls by a submitter that waits for another submitter, a driver or the end of a run."""

# Readers and followers of a run.

FOLLOW_INTERVAL = 0.05
"""Seconds between two polls of a run directory on a local disk."""

THOROUGH_INTERVAL = 2.0
"""Seconds between two reads of every log, since a file server may report the sizes of logs late."""

RETRY_DELAY_MAX = 24 * 3600.0
"""Longest delay in seconds between two tries, if the delay grows."""

RENEWAL_INTERVAL_REMOTE = 60.0
"""Longest time in seconds between two renewals on an object store, where each renewal is a request."""

RENEWAL_INTERVAL = 10.0
"""Longest time in seconds between two renewals of a followed run's lease."""

SHORTEST_PACE = 1.0
"""Shortest interval in seconds between two writes to an object store, or polls of it."""

LONGEST_PACE = 10.0
"""Longest such interval in seconds. A run older than a quarter of an hour may receive a request to cancel that late."""

REMOVAL_CLAIM_TIMEOUT = 3600.0
"""Seconds for which a submission may be claimed but not written, since the upload of a large payload takes time."""

# A rank: rows.

ROWS_POLL_INTERVAL = 0.05
"""Seconds between two looks whether another thread has taken its batch of rows."""

# A rank: Horovod.

HVD_ROUND_PAUSE = 0.001
"""Seconds before the next round after a round without a ready operation."""

HVD_STALL_CHECK_INTERVAL = 1.0
"""Seconds between two checks of a rank's wait, and after which it records that it is in its round."""

HVD_STALL_WARNING_AFTER = 60.0
"""Default of ``HOROVOD_STALL_CHECK_TIME_SECONDS``."""

HVD_STALL_TIMEOUT = 1800.0
"""Default of ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``."""

HVD_STALL_TIMEOUT_MAX = 30 * 24 * 3600.0
"""Largest value of both variables."""

# A rank: Ray Train.

RAY_GROUP_TIMEOUT = 1800
"""Ray's default timeout of a collective, in seconds."""
