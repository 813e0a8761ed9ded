"""The interface of rankzero for orchestrators: everything that an integration needs, and nothing that it does not.

An integration (`airflow_rankzero`, `dagster_rankzero`, or one of your own) imports `rankzero`, `rankzero.pipeline`,
`rankzero.errors` and `rankzero.tracking`. docs/integrations.md shows how to write one.

Open a run
    `PipelineTry` is the protocol by which an integration answers questions about one try of its step.
    `open_run` opens the run of a step's training: it starts the run, attaches to it, or finds its result.

Follow it
    `Follower` yields `LineWritten`, `MetricsReported` and `EngineOpened`, and has ended with the run.

Decide about tries
    `may_retry` says whether another try can help. `tries` computes for how long a run waits for the next try.

Deliver and describe the result
    ``RunHandle.offer`` and ``RunHandle.acknowledge`` record who has the result. `plain` decides what an orchestrator's
    database can hold. `map_refs` finds the references within arguments. `attempt` runs bookkeeping that must not fail
    a step. `reports` makes rows of the metrics, `curves` draws the rows, and `page` draws the report of a run.

Take options
    `step_options` returns the table of the options of a run, each with its name, type, default, help and checks.
    `check_callable` checks a function with its arguments, `datasets` tells a path from a table, `store` joins and
    normalizes paths and URLs, `secrets_of` finds what a log must not show. `examine` tests a connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankzero import lazy_names

if TYPE_CHECKING:
    from rankzero import store as store
    from rankzero.doctor.examine import examine as examine
    from rankzero.launcher import open_run as open_run
    from rankzero.masking import secrets_of as secrets_of
    from rankzero.options import step_options as step_options
    from rankzero.report import curves as curves
    from rankzero.report import page as page
    from rankzero.run import reports as reports
    from rankzero.run import tries as tries
    from rankzero.run.follower import EngineOpened as EngineOpened
    from rankzero.run.follower import Follower as Follower
    from rankzero.run.follower import LineWritten as LineWritten
    from rankzero.run.follower import MetricsReported as MetricsReported
    from rankzero.run.tries import PipelineTry as PipelineTry
    from rankzero.run.tries import attempt as attempt
    from rankzero.run.tries import may_retry as may_retry
    from rankzero.submit import datasets as datasets
    from rankzero.submit.training import check_callable as check_callable
    from rankzero.values import plain as plain
    from rankzero.values.ref import map_refs as map_refs

_NAMES = (
    "store report.curves report.page run.tries run.reports submit.datasets values.plain doctor.examine.examine "
    "masking.secrets_of options.step_options run.tries.PipelineTry run.tries.attempt run.tries.may_retry "
    "run.follower.EngineOpened run.follower.Follower run.follower.LineWritten run.follower.MetricsReported "
    "launcher.open_run submit.training.check_callable values.ref.map_refs"
)

lazy_names(__name__, _NAMES, root="rankzero")

__all__ = sorted(path.rpartition(".")[2] for path in _NAMES.split())
