"""Time limits in seconds, by the process in which they hold, and sizes that several modules share.

Limits of different processes hold in relation to each other; `tests/test_bounds.py` has these relations. Modules read a
limit when they use it, so tests may change it. This module imports nothing, since every process loads it.
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
"""Seconds without a heartbeat after which a driver thread whose system shows no threads (macOS) counts as dead."""

CLOCK_SKEW = 300.0
"""Most seconds by which the clocks of two hosts may differ."""

STORE_OUTAGE = 300.0
"""Seconds of retries while the store fails at the end of a training: its result is worth more than the wait."""

LOG_TAIL = 20
LOG_TAIL_WIDTH = 2000
"""Last log lines of a rank that are kept for an error message, and the characters to which each is cut."""

CANCEL_TIMEOUT = 30.0
"""Seconds, beyond its ``stop_grace``, for a cancelled run to end; nearly all if neither agents nor engine reply."""

RETURNED_NOTICE = 30.0
RETURNED_HANG = 300.0
"""Seconds without progress, after some ranks have returned, until a log line says what the others are doing, and until
they hang if they wait in a collective, whatever ``hang_timeout`` is."""

MEET_TIMEOUT = 30.0
"""Seconds for a rank to connect to rank 0's rendezvous."""

UNFINISHED_AFTER = 3600.0
"""Seconds since its last change after which a temporary file counts as left by a killed process."""

# The channel: its two ends, in agents and the driver.

PING_INTERVAL = 1.0
"""Longest time between two frames of each end, which also report how many frames have arrived."""

CONNECTION_SILENCE = 5.0
CONNECTION_LOST_AFTER = 15.0
"""Time without a frame after which a connection is broken, so that the agent makes a new one, and the end is lost."""

AGENT_CONNECT_TIMEOUT = 20.0
"""Time from its start that an agent has to find a driver that proves the secret, unless it was given another."""

CONNECT_TRY_TIMEOUT = 2.0
"""Time for one connection to be made, on the agent's side."""

HANDSHAKE_REPLY_TIMEOUT = 5.0
"""Time for the handshake, on the agent's side. It is long because a driver serves agents that connect together one
after the other, and agents that give up and come again would only lengthen the queue."""

CONNECT_PAUSE_MIN = 0.1
CONNECT_PAUSE_MAX = 1.0
"""First and longest pause between two tries to connect; each is twice as long as the one before. After a connection
that lived longer than the longest, the first try has no pause."""

HANDSHAKE_TIMEOUT = 10.0
"""Time that a new connection has to prove the secret to the driver."""

UNPROVED_GRACE = 1.0
"""Age before which an unproved connection is not closed for a new one, because many agents may connect together."""

LAST_READ_TIMEOUT = 0.3
DISCONNECT_TIMEOUT = 1.0
CHANNEL_CLOSE_TIMEOUT = 5.0
"""Time to read what ended agents sent, for agents to receive the server's disconnect, and for its thread to end."""

CHANNEL_JOIN_MARGIN = 0.5
"""Time beyond its timeout that an agent's `close` waits for the thread, which may hang in a name lookup."""

CERTIFICATE_TIMEOUT = 30.0
"""Seconds for the openssl command."""

REDRAW_INTERVAL = 10.0
"""Seconds in which one redraw of a progress bar becomes a line: an hour of two ranks is less than 1000 lines."""

DELIVERY_INTERVAL = 0.5
"""Seconds between two deliveries of messages that may wait: metrics, and the lines of a rank that prints little."""

# An agent.

FLUSH_TIMEOUT = 1.0
"""Seconds, or half of the grace, for stopped ranks to send reports that they hold; native code may not answer."""

LAST_LINES_TIMEOUT = 600.0
LAST_LINES_STALL_TIMEOUT = 15.0
"""Seconds to deliver all last lines after a success, and seconds without an accepted one until they are dropped."""

STOPPED_LINES_TIMEOUT = 1.5
"""Seconds to deliver the last lines after a failure or a cancel."""

LAST_LINES_POLL_INTERVAL = 0.001
"""Seconds until the first poll whether the driver has accepted the last lines; the interval doubles."""

STACKS_TIMEOUT = 2.0
"""Seconds that the workers get to write their stacks."""

WORKER_EXIT_MARGIN = 4.0
CUT_OFF_GRACE = 5.0
"""Seconds to exit for a rank whose ``exit_timeout`` is over, and for one that has closed its connection too early."""

# The driver.

STORE_RETRY_INTERVAL = 1.0
OUTCOME_RETRY_INTERVAL = 0.25
"""Seconds between two requests to a store that fails, and between two writes of a status whose outcome is certain."""

CHECKPOINT_COMMIT_TIMEOUT = 600.0
"""Seconds that a run waits at its end for checkpoints that are still being stored, and a rank for the commit of one."""

REFUSAL_PAUSE = 300.0
"""Seconds for which a rank sends its checkpoints to the driver after the object store has refused one of them."""

CHECKPOINT_RETRY_TIMEOUT = 30.0
"""Seconds for which the commit of the newest checkpoint is retried while the store refuses it."""

WRITE_RETRY_INTERVAL = 0.5
"""Seconds between two tries to write a checkpoint, a result or the last lines to a store that has failed."""

STAGE_END_TIMEOUT = 5.0
"""Seconds for a stage to end after its driver has exited; then it is cancelled. The connection may be broken."""

CAUSE_WINDOW = 2.0
"""Seconds to wait for the first cause: of failures that may all be consequences, and for what explains a lost agent."""

SESSION_CLOSE_TIMEOUT = 10.0
"""Seconds for an engine session to close (a SparkContext to stop)."""

STOP_MARGIN = 2.0
"""Seconds beyond the grace until agents that do not disconnect are cancelled at the engine, which has as long."""

SUCCESS_END_TIMEOUT = 25.0
"""Seconds without a message until agents are cancelled after a success; they run exit handlers and deliver lines."""

STACKS_WINDOW = 5.0
SLOTS_TIMEOUT = 2.0
"""Seconds to wait for stacks once a run counts as hung, and for slots that are asked for as ``start_timeout`` ends."""

RESTART_PAUSE_MAX = 60.0
"""Longest pause in seconds before a restart."""

AGENT_CONNECT_TIMEOUT_MIN = 1.0
"""Seconds that an agent has at least to find its driver."""

GROWTH_TIMEOUT = 30.0
"""Seconds without a new slot until an elastic attempt starts; a quarter of ``start_timeout`` where that is less."""

WAITING_INTERVAL = 30.0
"""Seconds between two messages about what an attempt waits for."""

REPORT_INTERVAL = 30.0
REPORT_TIMEOUT = 10.0
"""Least seconds between two reports of a running run, and seconds for the last report or card. A run that has ended
then removes the old report, rather than show an outdated one."""

HEARTBEAT_DELAY = 1.0
"""Seconds by which a heartbeat to an object store is delayed, so that the write of lines usually carries it."""

TRACKER_POLL_INTERVAL = 1.0
"""Seconds between two polls of the events for a tracker; on an object store at least as many as its readers wait. The
first poll waits, too, so that a tracker's imports do not slow down the start of the ranks."""

TRACKER_PAUSE_MAX = 60.0
TRACKERS_TIMEOUT = 10.0
"""Most seconds until a tracker that keeps failing is called again, and seconds for all trackers after a run's end."""

TICK = 0.1
TICK_OF_TRAINING = 0.5
"""Seconds between two checks of time limits and of the run directory, and the same while every rank trains."""

LEASE_POLL_INTERVAL_MAX = 30.0
"""Most seconds between two reads of a lease on an object store, since it may have been shortened."""

CANCEL_REQUEST_TIMEOUT = 0.9
"""Seconds for a read of the store that says whether a user has requested the end that a signal asks for."""

# Every process: polls.

POLL_INTERVAL_BRIEF = 0.02
POLL_INTERVAL_SHORT = 0.05
POLL_INTERVAL = 0.1
POLL_INTERVAL_LONG = 0.5
POLL_INTERVAL_LONGEST = 1.0
"""Seconds between two polls of what cannot wake the process that waits for it. The longer it usually takes, the longer
the interval: a lock or a file, a directory or a full window, ranks and slots, a server that starts, an owner."""

# Every process: its host.

KILL_TIMEOUT = 5.0
REAP_INTERVAL = 0.01
"""Seconds for a process to exit after SIGKILL, unless it is stuck in the kernel, and between two polls for that."""

CLEANERS_TIMEOUT = 1.0
"""Seconds for processes to remove the shared memory of killed ranks."""

CONNECT_HEAD_START = 0.25
"""Seconds by which a host is tried before the next one, so that earlier ones are preferred."""

USAGE_FIRST_SAMPLE = 1.0
USAGE_INTERVAL_MIN = 5.0
USAGE_INTERVAL_MAX = 60.0
"""Seconds until the first sample of a host, and least and most between two, a hundredth of the ranks' time so far."""

# Every process: an object store.

S3_REQUEST_TIMEOUT = 60.0
S3_CONNECT_TIMEOUT = 5.0
"""Seconds without a byte after which a request to S3 fails, as for boto3 (pyarrow's 3 are too few), and to connect."""

# A rank.

FORK_TIMEOUT = 30.0
"""Seconds for which a fork waits for an import, or a request to an object store, of another thread of rankzero."""

READ_AHEAD_EXIT_TIMEOUT = 5.0
"""Seconds for which a process that exits waits for a piece that is being read."""

DECODE_LOCK_TIMEOUT = 120.0
"""Seconds for which a rank waits for a group that another rank decodes; then it decodes the group, too."""

PART_UPLOAD_TIMEOUT = 30.0
"""Seconds from the first failed write of a checkpoint's part to the store until the rank gives up retrying."""

PROGRESS_LINE_INTERVAL = 5.0
PROGRESS_REDRAW_INTERVAL = 0.2
"""Seconds between two progress lines in a log, and between two updates of the progress line in a terminal."""

HVD_ROUND_PAUSE = 0.001
"""Seconds before Horovod's next round after a round without a ready operation."""

# Readers: reports, cards, the command line and trackers.

WATCH_INTERVAL = 2.0
"""Seconds between two listings of a store with ``--watch``."""

TRACKER_UPLOAD_INTERVAL = 60.0
"""Least seconds between two uploads to an object store, which cannot append."""

# Submitters, readers and followers of a run.

OWNER_LEASE = 20.0
"""Seconds that a driver on the cluster continues without its run's owner process: less than `CANCEL_TIMEOUT`."""

CLAIM_TIMEOUT = 20.0
"""Seconds until another submitter that claimed a run without writing ``job.json`` counts as dead; longer for a
submitter that has itself needed longer to write its files."""

FOLLOW_INTERVAL = 0.05
"""Seconds between two polls of a run directory on a local disk."""

THOROUGH_INTERVAL = 2.0
"""Seconds between two reads of every log, since a file server may report the sizes of logs late."""

RETRY_DELAY_MAX = 24 * 3600.0
"""Longest delay in seconds between two tries, if the delay grows."""

RENEWAL_INTERVAL = 10.0
RENEWAL_INTERVAL_REMOTE = 60.0
"""Most seconds between two renewals of a lease, on a disk and on an object store, where each is a request."""

SHORTEST_PACE = 1.0
LONGEST_PACE = 10.0
"""Shortest and longest interval in seconds between two writes to an object store, or polls of it. A run older than a
quarter of an hour may receive a request to cancel as late as the longest."""

SCHEDULING_SLACK = 900.0
"""Seconds between the time a try is due and its first poll of the run: a pool may be full, or a deployment slow."""

DETACHED_LEASE = 1800.0
"""Shortest lease in seconds of a run that a service follows for its step, such as a triggerer, which may restart."""

LAST_LEASE = 60.0
"""Seconds for which a run outlives the last try that attached to it. Longer than a short outage of a store."""

REMOVAL_CLAIM_TIMEOUT = 3600.0
"""Seconds for which a submission may be claimed but not written, since the upload of a large payload takes time."""

# A task. Its code is pickled by value, so it imports these names, and tests change them there.

AGENT_EXIT_TIMEOUT = 3.0
"""Seconds for an agent to exit once the task process has closed its standard input."""

ABANDONED_AFTER = 60.0
"""Seconds since its last change for which a directory may be unlocked, because it has just been created."""

WARM_LOCK_TIMEOUT = 3.0
WARM_LOCK_INTERVAL = 0.005
"""Seconds to wait for another task that is starting a warm server, and between two tries to lock."""

WARM_REPLY_TIMEOUT = 120.0
"""Seconds for a warm server, which may still import torch, to reply to a request."""

WARM_ORPHAN_TIMEOUT = 7.0
"""Seconds for an agent to die with its warm server, and for the server to report an agent's exit status."""

NEXT_ATTEMPT_SLOW_AFTER = 5.0
"""Seconds after which a task that waits for its next agent lists the folder of the run less often."""

CANCEL_POLL_INTERVAL = 2.0
CANCEL_POLL_INTERVAL_OF_DRIVER = 0.2
"""Seconds between two polls for a request to kill the agent: of a thousand tasks, and of task 0 and its driver."""

# A warm server.

WARM_IDLE_TIMEOUT = 300.0
"""Seconds without an agent after which a warm server exits."""

WARM_CHORE_AFTER = 0.5
"""Seconds without a request after which a warm server does chores that make later ones cheaper."""

WARM_LOAD_AFTER = 5.0
"""Seconds after a request when a warm server loads the rest although agents run: else each rank of a restart would."""

WARM_PRELOAD_TIMEOUT = 5.0
"""Seconds for the modules of ``RANKZERO_PRELOAD``: a launch waits meanwhile."""

WARM_OWNERLESS_MARGIN = 15.0
"""Seconds, after their grace, until agents are killed whose warm server has lost its owner."""

WARM_REQUEST_TIMEOUT = 5.0
"""Seconds for a client of a warm server to send its request once it has connected."""

# Engines, in the driver.

ENGINE_ERROR_TIMEOUT = 10.0
"""Seconds to get the text of an engine's error."""

GPU_LISTING_TIMEOUT = 60.0
"""Seconds for ``nvidia-smi``, or for torch in an interpreter of its own, to list the GPUs."""

CONNECT_SERVER_TIMEOUT = 10.0
"""Seconds for a Spark Connect server to accept a TCP connection."""

CONNECT_SESSION_WINDOW = 1800.0
"""Seconds for which launches share a session of a Spark Connect server, which keeps an unused one for an hour."""

CONNECT_DRIVER_TIMEOUT = 20.0
"""Seconds for an agent on Spark Connect to reach the driver: executors may have no route to a client's host at all."""

DATAFRAME_PROGRESS_INTERVAL = 10.0
"""Seconds between two lines about a DataFrame that Spark is computing."""

HTTP_REQUEST_TIMEOUT = 30.0
"""Seconds for a browser to send a request to `rankzero serve`."""

SPARK_SUBMIT_TIMEOUT = 180.0
"""Seconds for ``spark-submit`` to start a JVM, upload the files and get the driver accepted."""

# The doctor.

DOCTOR_CONNECT_TIMEOUT = 3.0
"""Seconds for one address of a Spark master to be resolved and to accept a connection."""

DOCTOR_STORE_TIMEOUT = 15.0
"""Seconds for a store, whose client may retry for minutes, to take an object, and a driver to write its last files."""

DOCTOR_HANG_TIMEOUT = 60.0
"""Seconds without progress after which the examination's ranks count as hung; short, since a user waits for them."""
