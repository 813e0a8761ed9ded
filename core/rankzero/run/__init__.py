"""The run directory and its readers: its files, following, delivery, decisions about an existing run, removal.

Submitters, drivers and readers on different hosts share only the code of this package. It starts no process.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "checkpoints.list_committed checkpoints.Manifest current.CurrentStatus current.owns "
    "detach.detaching directory.EVENTS directory.LINES directory.RunDirectory directory.RunStatus growing.Position "
    "identity.Asked identity.compare identity.Comparison identity.describe identity.Identity lease.longest_delay "
    "lease.power listing.list_runs liveness.dead_after liveness.process_lives pace.LONGEST_PACE pieces.PieceWriter "
    "reconcile.decide reconcile.Decision renewal.INTERVAL_REMOTE "
    "retention.ABANDONED retention.Age retention.CLAIM_PATIENCE retention.collect retention.EARLIER "
    "retention.HALF_REMOVED retention.HIDDEN retention.is_due retry.may_retry",
)
