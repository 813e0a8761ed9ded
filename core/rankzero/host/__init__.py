"""Queries about the machine that a process runs on: processes and their descendants, forks, addresses.

Modules here import only the standard library and know nothing of runs. Nothing is found by name: an agent is a child
subreaper, and a `guard` above it kills what an agent that was killed leaves. Each process of rankzero starts with an
empty signal mask, default dispositions and its own descriptors (`processes.settle_signals`).
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "forks.held network.first_reachable network.listen network.socket_environment processes.describe_process "
    "processes.OPEN_FILES processes.process_namespace processes.process_start processes.process_state "
    "processes.signal_main_thread processes.this_thread usage.UsageSampler",
)
