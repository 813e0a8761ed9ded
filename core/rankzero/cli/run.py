"""``rankzero run``: runs a script on several ranks, locally or on a cluster, with ``torchrun``'s options, too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from rankzero.cli import words
from rankzero.errors import (
    EngineError,
    HangError,
    InvalidJobError,
    RankZeroError,
    RunCancelledError,
    RunTimeoutError,
)
from rankzero.kinds import FLAG, WORLD
from rankzero.options import TABLE

if TYPE_CHECKING:
    from rankzero.run.handle import RunHandle

EXIT_CODES = {InvalidJobError: 2, EngineError: 3, RunTimeoutError: 4, HangError: 4, RunCancelledError: 130}
"""Exit codes by type of error; a failed training exits with 1."""

INTERRUPTED = 130

# torchrun's options for rendezvous, logs and monitors, which rankzero has its own way for. The last three are flags.
_IGNORED = (
    "--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --monitor-interval --start-method --event-log-handler --role "
    "--log-dir --redirects/-r --tee/-t --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters "
    "--master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout "
    "--standalone --run-path --virtual-local-rank"
)


def _ignored(command: Any) -> Any:
    """Adds torchrun's options without a meaning in rankzero, as hidden options that are ignored."""
    names = _IGNORED.split()
    for name in names:
        hidden: dict[str, Any] = {"hidden": True, "expose_value": False, "callback": _note_ignored}
        command = click.option(*name.split("/"), is_flag=name in names[-3:], **hidden)(command)
    return command


_FORMS: dict[Any, dict[str, Any]] = {
    bool: {"is_flag": True},
    int: {"type": int},
    dict[str, str]: {"multiple": True, "callback": words.pairs},
    list[str]: {"multiple": True},
}
"""Arguments of `click.option` by the type of an option's plain value."""


def _launcher_options(command: Any) -> Any:
    """Adds the options of a run that a command line can hold, each with the first sentence of its help."""
    for each in reversed(TABLE.values()):
        kind, name = each.kind, each.name.replace("_", "-")
        if kind.form:
            flag = f"--{name}/--no-{name}" if kind is FLAG and each.default is not False else f"--{name}"
            default = f"{each.default:g}s" if isinstance(each.default, float) else each.default
            default = None if kind.plain is None or default == () else default
            arguments = {"metavar": kind.form, "default": default, **_FORMS.get(kind.plain, {})}
            text = re.split(r"[.;:](?: |$)", each.help.replace("`", ""))[0]
            flags = [each.name, flag, *each.flag.split()]
            command = click.option(*flags, show_default=True, help=text and f"{text}.", **arguments)(command)
    return command


def _note_ignored(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        click.echo(f"rankzero: {param.opts[0]} has no meaning here and is ignored", err=True)


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        # torchrun accepts underscores in options, such as --nproc_per_node.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)
@_launcher_options
@click.option("--nproc-per-node", metavar="N", help="torchrun's: ranks of each node; 'auto', 'gpu' and 'cpu' too.")
@click.option("--nnodes", metavar="N", help="torchrun's: nodes, or MIN:MAX.")
@click.option("--engine", default="local", show_default=True, help="local, a Spark master (spark://..., yarn), sc://")
@click.option("--deploy-mode", type=click.Choice(["client", "cluster"]), default="client", help="As spark-submit's.")
@click.option("--conf", multiple=True, callback=words.pairs, metavar="NAME=VALUE", help="Spark configuration.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program.")
@click.option("--detach", "-d", is_flag=True, help="Start it, print its directory and return.")
@click.option("--json", "as_json", is_flag=True, help="Print the run's final state as JSON, on the last line.")
@click.option("--node-rank", type=int, default=0, hidden=True)
@_ignored
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Train SCRIPT on several ranks. All arguments after SCRIPT are passed to it.

    SCRIPT is a file, "module:function", "file.py:function", or with -m a module. The ranks' lines go to standard
    output, each with its rank.

    Exit codes: 0 success; 1 the training failed; 2 refused before anything started; 3 no slots, no cluster;
    4 the training took too long or hung; 130 cancelled.
    """
    with _cancelled_by_signals():
        code = _run(script, arguments, **options)
    ctx.exit(code)


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP in the block raise KeyboardInterrupt as Ctrl-C does, unless they are ignored (nohup)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    replaced = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _run(script: str, arguments: tuple[str, ...], *, detach: bool, as_json: bool, **options: Any) -> int:
    from rankzero.launcher import acknowledge, open_run
    from rankzero.run.lines import print_line

    handle: RunHandle[Any] | None = None
    try:
        train = _train(script, module=options.pop("module"), no_python=options.pop("no_python"))
        if isinstance(train, list):
            train, arguments = [*train, *arguments], ()
        launcher = _launcher(**options)
        if detach:
            handle = launcher.submit(train, *arguments)
            if handle.attached and handle.status().state == "succeeded":
                # As without --detach: after a success it trains again.
                handle.acknowledge()
                handle = launcher.submit(train, *arguments)
            if as_json:
                words.print_json({"id": handle.id, "directory": handle.directory})
            else:
                click.echo(handle.directory)
            return 0
        with open_run(launcher, train, arguments, {}) as handle:
            for line in handle.lines(follow=True, earlier=False):
                print_line(line.prefixed, handle.id)
        handle.result_ref()
        acknowledge(handle)
    except RankZeroError as error:
        click.echo(f"{type(error).__name__}: {error}\n{error.code}: docs/errors.md#{error.code.lower()}", err=True)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    except KeyboardInterrupt:
        click.echo(f"cancelled: {handle.directory if handle else script}", err=True)
        return INTERRUPTED
    finally:
        if as_json and handle and not detach:
            found = handle.status()
            facts = {"id": handle.id, "directory": handle.directory, "state": found.state, "metrics": found.metrics}
            words.print_json({**facts, "result": found.result, "error": found.error})
    if not as_json:
        click.echo(f"succeeded: {handle.directory}", err=True)
    return 0


def _train(script: str, *, module: bool, no_python: bool) -> str | list[str]:
    if module and no_python:
        raise InvalidJobError("-m and --no-python exclude each other")
    # As for `python -m`, modules of the working directory can be imported.
    sys.path.insert(0, os.getcwd())
    file, _, function = script.rpartition(":")
    if file.endswith(".py") and os.path.isfile(file):
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        script = f"{os.path.basename(file).removesuffix('.py')}:{function}"
    return [script] if no_python else f"-m {script}" if module else script


def _launcher(
    *,
    num_processes: str | None,
    nproc_per_node: str | None,
    nnodes: str | None,
    engine: str,
    deploy_mode: str,
    node_rank: int,
    conf: dict[str, str],
    **options: Any,
) -> Any:
    from rankzero.launcher import Launcher

    nodes = WORLD.read("--nnodes", nnodes or "1")
    most = nodes[1] if isinstance(nodes, tuple) else nodes
    if node_rank or (engine == "local" and most not in (1, "auto")):
        # Each start of the command would be a separate training with all ranks.
        raise InvalidJobError(
            f"this line is for several nodes (nodes: {nnodes or 1}, this one: {node_rank}): rankzero is started "
            "once for all of them, with --engine spark://... (or another cluster) and without a node's rank; for this "
            "machine alone give the number of ranks without nodes"
        )
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return Launcher(
        _world(num_processes, nproc_per_node, nnodes, use_gpu=options["use_gpu"]),
        engine=engine_of(engine, conf, deploy_mode),
        **{
            name: TABLE[name].kind.read(name, value) if isinstance(value, str) else value
            for name, value in given.items()
        },
    )


def engine_of(name: str, conf: dict[str, str], deploy_mode: str = "client") -> Any:
    """Returns the engine that ``--engine`` and ``--deploy-mode`` name. Raises InvalidJobError."""
    from rankzero import LocalEngine, SparkConnectEngine, SparkEngine, SparkSubmitEngine

    if deploy_mode != "client":
        return SparkSubmitEngine(master=name, conf=conf)
    if name == "local":
        if conf:
            raise InvalidJobError("--conf is Spark's: name a Spark master with --engine, such as local[2]")
        return LocalEngine()
    if name.startswith("sc://"):
        return SparkConnectEngine(name)
    return SparkEngine(master=name, conf=conf)


def _world(num_processes: str | None, nproc_per_node: str | None, nnodes: str | None, *, use_gpu: bool) -> Any:
    """Returns the world size from ``--num-processes``, or from torchrun's two options multiplied."""
    if num_processes is not None and (nproc_per_node or nnodes):
        raise InvalidJobError("give --num-processes, or torchrun's --nnodes and --nproc-per-node, not both")
    if num_processes is not None:
        return WORLD.read("--num-processes", num_processes)
    each = nproc_per_node or "1"
    nodes = WORLD.read("--nnodes", nnodes or "1")
    if each in ("auto", "gpu", "cpu"):
        if each == "gpu" and not use_gpu:
            raise InvalidJobError("--nproc-per-node=gpu is a rank for each GPU: say --use-gpu, too")
        if nodes not in (1, (1, 1)):
            raise InvalidJobError(f"--nproc-per-node={each} counts what one node has: give --num-processes=auto")
        return "auto"
    per_node = WORLD.read("--nproc-per-node", each)
    if not isinstance(per_node, int) or not isinstance(nodes, (int, tuple)):
        raise InvalidJobError(f"--nproc-per-node is {each!r}; it must be a number, auto, gpu or cpu")
    if isinstance(nodes, int):
        return nodes * per_node
    least, most = nodes
    return least * per_node if least == most else (least * per_node, most * per_node)
