"""The interface of rankzero for orchestrators: everything that an integration needs, and nothing that it does not.

An integration (`airflow_rankzero`, `dagster_rankzero`, or one of your own) imports `rankzero`, `rankzero.pipeline`,
`rankzero.errors` and `rankzero.tracking`. docs/integrations.md shows how to write one.

Open a run
    `PipelineTry` is the protocol by which an integration answers questions about one try of its step.
    ``Launcher(...).durable(train, args, kwargs, step, log)`` opens the run of the step: it starts the run, attaches to
    it, or finds its result, and yields an `Opened`. `detaching` and `end` do the same for a run that was opened before.
    `describe_process` names a process for `PipelineTry.retrier`. `Engine` is the type of an engine, `embedded_engine`
    the engine of a step without a cluster.

Follow it
    `Follower` yields `LineWritten`, `MetricsReported` and `EngineOpened`, and has ended with the run. `print_line`
    writes a line to standard output as the launcher does, `level_of` returns its logging level.

Decide about tries
    `may_retry` says whether another try can help. `lease` computes for how long a run waits for the next try.

Deliver the result
    ``RunHandle.offer`` and ``RunHandle.acknowledge`` record who has the result. `find_unstorable`, `storable` and
    `plain_view` decide what an orchestrator's database can hold, up to `VALUE_LIMIT` bytes. `map_refs` finds the
    references within arguments. `split` and `verify` read the digest of a stored value. `attempt` runs bookkeeping
    that must not fail a step.

Describe it
    `reports` makes rows of the metrics, and `curves` draws the rows. `is_number` is True for a value that can be
    drawn, `REPORT_FILE` is the name of the report in a run directory, and `page` draws a report on demand.

Take options
    `step_options` returns the table of the options of a run, each an `Option` with its name, default, help and checks.
    `described` puts their help into the docstring of a class, and `with_matches` suggests the right name for a misspelt
    one. `spelt` makes text of a number or flag. `NumProcesses`, `RestartOn` and `AUTO` are types and defaults of
    options; `world_bounds`, `describe_world`, `qualified_name`, `is_module_reference`, `check_callable` and `datasets`
    check and show them. `store` joins and normalizes paths and URLs, `secrets_of` finds what a log must not show.
    `find_problems` and `examine` test a connection; the level of a finding is `OK` where nothing is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankzero import lazy_names

if TYPE_CHECKING:
    from rankzero import store as store
    from rankzero.doctor.examine import examine as examine
    from rankzero.doctor.examine import find_problems as find_problems
    from rankzero.doctor.findings import OK as OK
    from rankzero.engines.base import Engine as Engine
    from rankzero.engines.spark.engine import embedded_engine as embedded_engine
    from rankzero.host.processes import describe_process as describe_process
    from rankzero.job import describe_world as describe_world
    from rankzero.job import qualified_name as qualified_name
    from rankzero.job import world_bounds as world_bounds
    from rankzero.kinds import AUTO as AUTO
    from rankzero.kinds import NumProcesses as NumProcesses
    from rankzero.kinds import RestartOn as RestartOn
    from rankzero.masking import secrets_of as secrets_of
    from rankzero.options import Option as Option
    from rankzero.options import described as described
    from rankzero.options import step_options as step_options
    from rankzero.report import curves as curves
    from rankzero.report import page as page
    from rankzero.run import lease as lease
    from rankzero.run import reports as reports
    from rankzero.run.follower import EngineOpened as EngineOpened
    from rankzero.run.follower import Follower as Follower
    from rankzero.run.follower import LineWritten as LineWritten
    from rankzero.run.follower import MetricsReported as MetricsReported
    from rankzero.run.names import REPORT_FILE as REPORT_FILE
    from rankzero.run.output import level_of as level_of
    from rankzero.run.printing import print_line as print_line
    from rankzero.run.reports import is_number as is_number
    from rankzero.run.tries import PipelineTry as PipelineTry
    from rankzero.run.tries import attempt as attempt
    from rankzero.run.tries import detaching as detaching
    from rankzero.run.tries import end as end
    from rankzero.run.tries import may_retry as may_retry
    from rankzero.submit import datasets as datasets
    from rankzero.submit.durable import Opened as Opened
    from rankzero.submit.training import check_callable as check_callable
    from rankzero.submit.training import is_module_reference as is_module_reference
    from rankzero.texts import spelt as spelt
    from rankzero.texts import with_matches as with_matches
    from rankzero.values.digest import split as split
    from rankzero.values.digest import verify as verify
    from rankzero.values.plain import VALUE_LIMIT as VALUE_LIMIT
    from rankzero.values.plain import find_unstorable as find_unstorable
    from rankzero.values.plain import plain_view as plain_view
    from rankzero.values.plain import storable as storable
    from rankzero.values.ref import map_refs as map_refs

_NAMES = (
    "store report.curves report.page run.lease run.reports submit.datasets doctor.examine.examine "
    "doctor.examine.find_problems doctor.findings.OK engines.base.Engine engines.spark.engine.embedded_engine "
    "host.processes.describe_process job.describe_world job.qualified_name job.world_bounds kinds.AUTO "
    "kinds.NumProcesses kinds.RestartOn run.printing.print_line masking.secrets_of options.Option options.described "
    "options.step_options run.names.REPORT_FILE run.tries.attempt run.tries.PipelineTry run.tries.detaching "
    "run.tries.end run.follower.EngineOpened run.follower.Follower run.follower.LineWritten "
    "run.follower.MetricsReported run.output.level_of run.reports.is_number run.tries.may_retry "
    "submit.durable.Opened submit.training.check_callable submit.training.is_module_reference texts.spelt "
    "texts.with_matches values.digest.split values.digest.verify values.plain.VALUE_LIMIT "
    "values.plain.find_unstorable values.plain.plain_view values.plain.storable values.ref.map_refs"
)

lazy_names(__name__, _NAMES, root="rankzero")

__all__ = sorted(path.rpartition(".")[2] for path in _NAMES.split())


def __dir__() -> list[str]:
    return __all__
