"""The driver opens an engine, decides about attempts, and writes the outcome, in the caller's process or its own.

Code that ranks, agents or readers need belongs in other packages. Decisions are pure functions in `policy` and
`verdict`.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "commits.Committer driver.Driver failure.Failure handover.DrivenElsewhere handover.Handover hang.HangWatch "
    "outcome.Outcome outcome.Reason policy.Placement policy.Restarts recorder.Recorder remaining.describe "
    "remaining.is_waiting remaining.RemainingWatch reporter.Reporter roster.Member roster.Roster rows.carry_rows "
    "rows.remove_rows scratch.Scratch tables.Tables thread.DriverThread trackers.Trackers watch.Inbox watch.Watch",
)
