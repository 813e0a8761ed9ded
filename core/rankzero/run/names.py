"""The names of files in a run directory; docs/architecture.md#the-run-directory says who writes each."""

from __future__ import annotations

import re

SUBMISSIONS = "submissions"  # The folder of all submissions
OF_SUBMISSION = re.compile(r"([0-9]+)(?:\.json|-[0-9a-f]+)")  # The job there, which is its claim, and its folder
REPORT_FILE = "report.html"  # The report, which shows the run in a browser, in the run directory itself

# In the folder of a submission:
EVENTS = "events.jsonl"
LINES = "lines"  # The lines of all ranks, each as ``[rank] time text``
DRIVER_LOG = "driver.log"  # The output of a driver with a process of its own, and of its JVM; not on an object store
DATASETS_FILE = "datasets.json"  # The manifests of the datasets that the ranks read, by name
DATASETS = "datasets"  # The folder of rows that Spark has computed for the ranks, with a folder for each dataset
TABLES = "tables"  # The folder of rows that ranks have written, with a folder for each attempt
