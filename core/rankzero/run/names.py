"""The names of files in a run directory."""

from __future__ import annotations

import re

EVENTS = "events.jsonl"

LINES = "logs/lines"
"""The stream of the lines of all ranks on an object store."""

OUTCOME = "outcome.json"
"""The file with the certain status of a submission."""

DRIVER_LOG = "driver.log"
"""The output of a driver with a process of its own, and of its JVM. An object store has none."""

REPORT_FILE = "report.html"
"""The report, which shows the run in a browser."""

DATASETS = "datasets"
"""The folder of rows that Spark has computed for the ranks, with a folder for each dataset."""

TABLES = "tables"
"""The folder of rows that ranks have written, with a folder for each attempt."""

TOKEN = re.compile(rb"rankzero-[0-9a-f]{32}")
"""The text of the file ``token``."""

_LEFT = r"""status\.json | lease | driver\.log | report\.html | datasets\.json
    | (?:events\.jsonl | logs/lines)/[0-9]{8} | events\.jsonl | logs/rank-[0-9]+\.log
    | submissions/[0-9]+/(?:claim | driver | starting | delivery | cancel | stage/[^/]+
        | (?:payload\.pkl | (?:job | outcome | datasets)\.json | modules\.(?:zip | txt) | code\.(?:tar\.gz | txt))
        | driver\.py | rankzero\.jar)
    | checkpoints/[0-9]{4,}-[0-9]{6,}/(?:rank-[0-9]+\.[a-z.]+ | pieces\.jsonl | checkpoint\.json | damaged)
    | datasets/[^/]+-[0-9a-f]{8}(?:\.[0-9]+)?/(?:part-[^/]+\.parquet | _token)
    | flight/attempt-[0-9]+/rank-[0-9]+\.json
    | result/value-[0-9]+\.[a-z]+
    | tables/[0-9]{4,}/(?:[^/]+/part-[0-9]+-[0-9]+-[0-9a-f]+\.parquet | _begun-[^/]+)
    """
"""Paths of files that a driver or a rank may write after a user has removed the directory of their run."""

FOLDERS = {"submissions", "logs", "checkpoints", "flight", DATASETS, "result", TABLES}
"""Folders in which those files are."""


def is_run_file(path: str) -> bool:
    """Returns True for a path in a run directory that a driver or a rank may write, even after its removal."""
    return re.fullmatch(_LEFT, path, re.VERBOSE) is not None


def log_name(rank: int) -> str:
    """Returns the path of a rank's log within the run directory."""
    return f"logs/rank-{rank}.log"
