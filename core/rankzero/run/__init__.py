"""The run directory and whoever reads it: what lies where, following, delivery, what an existing run means, removal.

A submitter, a driver and a reader on another host meet only here. Nothing in here starts a process.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "checkpoints.list_committed checkpoints.Manifest current.CurrentStatus current.owns cursor.LogCursor "
    "detach.detaching directory.EVENTS directory.LINES directory.RunDirectory directory.RunStatus growing.Position "
    "identity.Asked identity.compare identity.Comparison identity.describe identity.Identity lease.longest_delay "
    "lease.power listing.list_runs liveness.dead_after liveness.process_lives pace.LONGEST_PACE pieces.PieceWriter "
    "progress.Progress progress.RankProgress reconcile.decide reconcile.Decision renewal.INTERVAL_REMOTE "
    "retention.ABANDONED retention.Age retention.CLAIM_PATIENCE retention.collect retention.EARLIER "
    "retention.HALF_REMOVED retention.HIDDEN retention.is_due retry.may_retry",
)
