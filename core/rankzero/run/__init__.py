"""The run directory and its readers: its files, following, delivery, decisions about an existing run, removal.

Submitters, drivers and readers on different hosts share only the code of this package. It starts no process.

A handle keeps to one submission. A follower begins behind the lines of earlier submissions; one that attaches shows few
earlier lines again, and one that is far behind skips lines with a note, since orchestrators store some hundred lines a
second. Each follower renews the run's lease, and the driver ends a run whose lease has expired; the last try that
attaches shortens it. All ranks share one stream of lines. An object store cannot append, and every poll there is a
request, so a stream there has numbered pieces, and ``status.json`` has its length.

A run directory stays until a user removes it (`retention`). A training that begins from scratch leaves the checkpoints
of the one before, and removes only its own. A result lives as long as its submission's folder.
"""
