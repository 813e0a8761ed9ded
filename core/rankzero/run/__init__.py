"""The run directory and its readers: its files, following, delivery, decisions about an existing run, removal.

Submitters, drivers and readers on different hosts share only the code of this package. It starts no process.

A handle cancels the submission that it was made for, and ignores the status of another nonce. A follower begins behind
the lines of earlier submissions; one that attaches shows few earlier lines again, and one that is far behind skips
lines with a note, since orchestrators store some hundred lines a second. Each follower renews the run's lease, and the
driver ends a run whose lease has expired; the last try that attaches shortens it. On a disk each rank has a file of
lines. An object store cannot append, and every poll there is a request, so all ranks share numbered pieces, and
``status.json`` has the length of each stream.

A run directory stays until a user removes it (`retention`). A training that begins from scratch leaves the checkpoints
of the one before, and removes only its own. A result lives as long as its run directory.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "checkpoints.list_committed checkpoints.Manifest observer.CurrentStatus observer.owns "
    "tries.detaching names.EVENTS names.LINES directory.RunDirectory status.RunStatus growing.Position "
    "identity.Asked identity.compare identity.Comparison identity.decide identity.Decision identity.describe "
    "identity.Identity lease.longest_delay "
    "lease.power listing.list_runs observer.dead_after observer.process_lives growing.PieceWriter "
    "retention.ABANDONED retention.Age retention.collect retention.EARLIER "
    "retention.HALF_REMOVED retention.HIDDEN retention.is_due "
    "tries.may_retry",
)
