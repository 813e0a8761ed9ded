"""Command lines of ``accelerate launch`` and ``deepspeed`` as options of ``rankzero run``.

The parsers of the two packages read the lines, and Accelerate's own functions make the environment of its ranks, so
that a line means what it means with the installed version.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import click

from rankzero.errors import InvalidJobError

Line = tuple[str, tuple[str, ...], dict[str, Any]]
"""A script, its arguments, and the options of ``rankzero run``."""

_CLUSTER = "name a cluster with rankzero run --engine spark://... (or another one)"

_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
"""Beginnings of the names of Accelerate's variables. All others are those of a launcher on one machine."""

_IGNORED = frozenset(
    {"log_dir", "main_process_ip", "main_process_port", "monitor_interval", "quiet", "rdzv_backend", "rdzv_conf",
     "role", "same_network", "tee"}
)  # fmt: skip
"""Options of ``accelerate launch`` for rendezvous, logs and monitors, which rankzero has its own way for."""


def translated(script: str, arguments: tuple[str, ...], options: dict[str, Any]) -> Line:
    """Returns what a line of another launcher runs, and with which options; any other script unchanged.

    Args:
        script: The first word of the line.
        arguments: The other words.
        options: The options that were given to ``rankzero run`` itself; they take precedence.

    Raises:
        InvalidJobError: the launcher is not installed or refuses the line, or the line means something else here.
        SystemExit: the launcher's parser has printed its help, or why it cannot read the line.
    """
    if script not in LAUNCHERS or options["module"] or options["no_python"]:
        return script, arguments, options
    for name in ("num_processes", "nproc_per_node", "nnodes"):
        if options[name]:
            raise InvalidJobError(f"the line of {script} says how many ranks there are: leave out --{name}")
    return LAUNCHERS[script](arguments, options)


def _accelerate(arguments: tuple[str, ...], options: dict[str, Any]) -> Line:
    from rankzero.engines.gpus import local_gpus

    is_local = options["engine"] == "local"
    if arguments[:1] != ("launch",):
        raise InvalidJobError("only `accelerate launch` is a training: call accelerate itself for its other commands")
    launch = _module("accelerate.commands.launch")
    args = launch.launch_command_parser().parse_args(arguments[1:])
    threads, given_gpus, given_ranks = args.num_cpu_threads_per_process, args.multi_gpu, args.num_processes
    for name in sorted(_IGNORED.intersection(getattr(args, "nondefault", ()))):
        click.echo(f"rankzero: --{name} has no meaning here and is ignored", err=True)
    try:
        args, config, has_precision = launch._validate_launch_command(args)
        # Without a configuration, Accelerate decides by the GPUs of this machine, which is none of the cluster's.
        if not (is_local or config or given_ranks):
            raise InvalidJobError("the line does not say how many ranks the cluster has: give --num_processes")
        nodes, ranks = args.num_machines or 1, max(args.num_processes or 1, 1)
        if ranks % nodes:
            raise InvalidJobError(f"--num_processes {ranks} is no multiple of --num_machines {nodes}: correct one")
        if isinstance(config, launch.SageMakerConfig) or args.tpu or args.mpirun_hostfile:
            raise InvalidJobError("SageMaker, TPUs and MPI are not supported: leave --tpu and --mpirun_hostfile out")
        # One call starts the ranks of all nodes, and finds a port for them.
        args.num_machines, args.main_process_port = 1, 0
        env = _environment(launch, args, config, has_precision)
    except InvalidJobError:
        raise
    except Exception as error:
        raise InvalidJobError(f"accelerate launch refuses this line: {error}") from error
    own = {name: value for name, value in env.items() if name.startswith(_PREFIXES)}
    if threads is not None:
        own["OMP_NUM_THREADS"] = str(threads)
    if args.gpu_ids not in (None, "all"):
        _limit_gpus("--gpu_ids", args.gpu_ids, options)
    on_cpu = args.cpu or args.use_cpu
    use_gpu = bool(options["use_gpu"] or (args.multi_gpu if is_local or config else given_gpus))
    if is_local:
        use_gpu = use_gpu or not (on_cpu or not local_gpus())
    elif not (use_gpu or on_cpu):
        raise _unclear("--cpu after `accelerate launch`")
    if not use_gpu and not args.use_deepspeed:
        # Without it each rank would find neither a GPU nor the others.
        own["ACCELERATE_USE_CPU"] = "true"
    return (
        args.training_script,
        tuple(args.training_script_args),
        {
            **options,
            "module": bool(args.module),
            "no_python": bool(args.no_python),
            "nproc_per_node": str(ranks // nodes),
            "nnodes": str(nodes),
            "node_rank": args.machine_rank or 0,
            "use_gpu": use_gpu,
            "max_restarts": options["max_restarts"] or args.max_restarts,
            "env": {**own, **options["env"]},
        },
    )


def _environment(launch: Any, args: Any, config: Any, has_precision: bool) -> dict[str, str]:
    """Returns the environment that Accelerate gives to its ranks, by the function for the kind of training."""
    found: Any
    if args.use_deepspeed and not args.cpu:
        fields = [*(config.deepspeed_config if config else ()), *(["mixed_precision"] if has_precision else ())]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, found = launch.prepare_deepspeed_cmd_env(args)
    elif (args.multi_gpu or args.use_fsdp or args.use_megatron_lm) and not args.cpu:
        found = launch.prepare_multi_gpu_env(args)
    else:
        _, found = launch.prepare_simple_launcher_cmd_env(args)
    return dict(found)


def _deepspeed(arguments: tuple[str, ...], options: dict[str, Any]) -> Line:
    runner = _module("deepspeed.launcher.runner")
    args = runner.parse_args([*arguments])
    for name, instead in (
        ("autotuning", "call deepspeed itself for it"),
        ("elastic_training", "give rankzero run --num-processes MIN:MAX and the script"),
    ):
        if getattr(args, name, None):
            raise InvalidJobError(f"--{name} is not supported: {instead}")
    accelerator = runner.get_accelerator()
    is_local = options["engine"] == "local"
    try:
        pool = runner.fetch_hostfile(args.hostfile) or {"localhost": accelerator.device_count() if is_local else 0}
        slots = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    except Exception as error:
        raise InvalidJobError(f"--hostfile, --include, --exclude: {error}; to train on hosts {_CLUSTER}") from error
    if [*slots] not in ([], ["localhost"]):
        raise InvalidJobError(f"the line names the hosts {', '.join(slots)}: leave them out, and {_CLUSTER}")
    if args.include or args.exclude:
        _limit_gpus("--include or --exclude", ",".join(map(str, slots.get("localhost", ()))), options)
    ranks = args.num_gpus if args.num_gpus > 0 else len(slots.get("localhost", ()))
    if not ranks:
        raise InvalidJobError("the line does not say how many ranks each node of the cluster has: give --num_gpus")
    # DeepSpeed counts the ranks of a machine by this variable, if they have no GPUs.
    env = {"LOCAL_SIZE": str(ranks)} if is_local else {}
    if not (is_local or options["use_gpu"] or os.environ.get("DS_ACCELERATOR") == "cpu"):
        raise _unclear("DS_ACCELERATOR=cpu in the environment")
    return (
        args.user_script,
        (*([] if args.no_local_rank else ["--local_rank=${local_rank}"]), *args.user_args),
        {
            **options,
            "module": args.module,
            "no_python": args.no_python,
            "nproc_per_node": str(ranks),
            "nnodes": str(max(args.num_nodes, 1)),
            "node_rank": max(args.node_rank, 0),
            "use_gpu": options["use_gpu"] or (is_local and accelerator.device_name() != "cpu"),
            "env": {**env, **options["env"]},
        },
    )


LAUNCHERS: dict[str, Callable[[tuple[str, ...], dict[str, Any]], Line]] = {
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
"""The commands whose lines ``rankzero run`` takes, each with the function that translates them."""


def _module(name: str) -> Any:
    """Returns the module of another launcher. Raises InvalidJobError if it is not installed."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InvalidJobError(
            f"{package}'s own parser reads its lines, and {error.name} is not installed: pip install {package}"
        ) from error


def _unclear(cpu: str) -> InvalidJobError:
    return InvalidJobError(
        f"the line does not say whether ranks on the cluster use GPUs: give rankzero run --use-gpu, or {cpu}"
    )


def _limit_gpus(option: str, gpus: str, options: dict[str, Any]) -> None:
    """Limits the GPUs of this machine that the ranks may use. Raises InvalidJobError on a cluster."""
    if options["engine"] != "local":
        raise InvalidJobError(f"{option} names GPUs of one machine: leave it out, the cluster assigns GPUs to tasks")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
