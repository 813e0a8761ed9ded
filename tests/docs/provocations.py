"""What makes each message of `docs/errors.md` appear, for real: a function for each entry, by its heading."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import Launcher, ResultRef, RunHandle, SparkConnectEngine, SparkEngine, WorkerFailedError, bounds

WAIT = 60.0

PROVOCATIONS: dict[str, Callable[[Launcher, Path], Any]] = {}
"""Each raises its error, given a launcher of two ranks and an empty directory, in which it is called."""

SLOW = {"a-driver-that-is-lost", "no-master", "no-process-followed"}
"""Those that take longer than seconds."""


def provocation(function: Callable[[Launcher, Path], Any]) -> Callable[[Launcher, Path], Any]:
    """Adds one."""
    PROVOCATIONS[function.__name__.replace("_", "-")] = function
    return function


def train(lr: float = 0.1) -> float:
    """A training that ends at once."""
    return lr


def wait() -> None:
    """A training that does not end by itself."""
    import threading

    threading.Event().wait(WAIT)


def running(handle: RunHandle[Any]) -> int:
    """The process of the driver, once its ranks run."""
    until(lambda: handle.status().state == "running", WAIT, "the ranks run")
    pid = handle.status().driver_pid
    assert pid is not None
    return pid


@provocation
def a_wrong_option(launcher: Launcher, here: Path) -> None:
    launcher.options(num_processes=0)


@provocation
def a_backend_that_does_not_fit(launcher: Launcher, here: Path) -> None:
    launcher.options(backend="nccl")


@provocation
def arguments_that_do_not_fit(launcher: Launcher, here: Path) -> None:
    launcher.run(train, learning_rate=0.1)  # type: ignore[call-arg]


@provocation
def an_argument_that_cannot_be_sent(launcher: Launcher, here: Path) -> None:
    launcher.run(train, threading.Lock())  # type: ignore[arg-type]


@provocation
def a_function_that_cannot_be_sent(launcher: Launcher, here: Path) -> None:
    lock = threading.Lock()
    launcher.run(lambda: lock)


@provocation
def a_script_that_is_not_there(launcher: Launcher, here: Path) -> None:
    launcher.run("trian.py")


@provocation
def a_module_that_is_not_there(launcher: Launcher, here: Path) -> None:
    launcher.run("acme.trian:main")


@provocation
def a_store_that_cannot_hold_runs(launcher: Launcher, here: Path) -> None:
    launcher.options(store="hdfs://namenode/runs").run(train)


@provocation
def a_store_that_cannot_be_written(launcher: Launcher, here: Path) -> None:
    (here / "file").touch()
    launcher.options(store=here / "file" / "runs").run(train)


@provocation
def a_run_id_that_is_taken(launcher: Launcher, here: Path) -> None:
    named = launcher.options(run_id="nightly")
    handle = named.submit(wait)
    try:
        named.run(train)
    finally:
        handle.cancel()
        handle.wait(WAIT)


@provocation
def a_run_directory_that_is_not_yours(launcher: Launcher, here: Path) -> None:
    (here / "nightly").mkdir()
    (here / "nightly").chmod(0o777)
    launcher.options(run_id="nightly", store=here).run(train)


@provocation
def dynamic_allocation(launcher: Launcher, here: Path) -> None:
    launcher.options(engine=SparkEngine("yarn", conf={"spark.dynamicAllocation.enabled": "true"})).run(train)


@provocation
def a_table_that_is_not_there(launcher: Launcher, here: Path) -> None:
    launcher.options(dataset="data/scans.parquet").run(train)


@provocation
def no_java(launcher: Launcher, here: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(here))
        patch.delenv("JAVA_HOME", raising=False)
        launcher.options(engine=SparkEngine("spark://head:7077")).run(train)


@provocation
def no_master(launcher: Launcher, here: Path) -> None:
    launcher.options(engine=SparkEngine("spark://localhost:1")).run(train)


@provocation
def no_spark_connect_server(launcher: Launcher, here: Path) -> None:
    launcher.options(engine=SparkConnectEngine("sc://localhost:1")).run(train)


@provocation
def a_host_that_is_lost(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import os
        import signal

        import rankzero.train as rt

        rt.barrier()
        if rt.get_context().rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        rt.barrier()

    launcher.run(train)


@provocation
def a_driver_that_is_lost(launcher: Launcher, here: Path) -> None:
    handle = launcher.submit(wait)
    os.kill(running(handle), signal.SIGKILL)
    handle.result()


@provocation
def fewer_slots_than_ranks(launcher: Launcher, here: Path) -> None:
    launcher.options(engine=SparkEngine("local[1]")).run(train)


@provocation
def fewer_gpus_than_ranks(launcher: Launcher, here: Path) -> None:
    launcher.options(num_processes=64, use_gpu=True).run(train)


@provocation
def ranks_that_do_not_start(launcher: Launcher, here: Path) -> None:
    # The interpreters of the ranks import it, and come no further.
    (here / "sitecustomize.py").write_text(f"import time\ntime.sleep({WAIT})\n")
    launcher.options(start_timeout=4, warm_start=False, env={"PYTHONPATH": str(here)}).run(train)


@provocation
def an_exception_of_the_function(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import rankzero.train as rt

        rt.barrier()
        if rt.get_context().rank == 0:
            raise ValueError("a learning rate must be positive")
        rt.barrier()

    launcher.run(train)


@provocation
def a_killed_rank(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import os
        import signal

        import rankzero.train as rt

        rt.barrier()
        if rt.get_context().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rt.barrier()

    launcher.run(train)


@provocation
def an_exit_code(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import os

        import rankzero.train as rt

        rt.barrier()
        if rt.get_context().rank == 0:
            os._exit(3)
        rt.barrier()

    launcher.run(train)


@provocation
def only_consequences(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import torch.distributed as dist

        raise dist.DistBackendError("wrong arguments")

    launcher.options(num_processes=1, max_restarts=2).run(train)


@provocation
def a_missing_package(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import rankzero.train as rt

        rt.barrier()
        if rt.get_context().rank == 0:
            __import__("acme_models")
        rt.barrier()

    launcher.run(train)


@provocation
def another_attempt_is_asked_for(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import rankzero.train as rt
        from rankzero import RetryableError

        rt.barrier()
        if rt.get_context().rank == 0:
            raise RetryableError("the data server is away")
        rt.barrier()

    launcher.run(train)


@provocation
def no_progress(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import threading

        import rankzero.train as rt

        # The bound begins anew when the group is there: to make it may take long on a busy machine.
        rt.barrier()
        rt.report({})
        if rt.get_context().rank == 1:
            threading.Event().wait(60)
        rt.barrier()

    launcher.options(hang_timeout=6).run(train)


@provocation
def a_rank_that_returned_early(launcher: Launcher, here: Path) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "RETURNED_NOTICE", 1.0)
        patch.setattr(bounds, "RETURNED_HANG", 3.0)
        launcher.run(train)


@provocation
def too_long(launcher: Launcher, here: Path) -> None:
    launcher.options(timeout=0.2).run(wait)


@provocation
def a_cancel(launcher: Launcher, here: Path) -> None:
    handle = launcher.submit(wait)
    handle.cancel()
    handle.result()


@provocation
def no_process_followed(launcher: Launcher, here: Path) -> None:
    handle = launcher.options(orphan_timeout=0.5).submit(wait)
    until(lambda: handle.status().final, WAIT, "the run has ended by itself")
    handle.result()


@provocation
def a_value_that_cannot_be_stored(launcher: Launcher, here: Path) -> None:
    def train() -> object:
        import threading

        return threading.Lock()

    launcher.run(train)


@provocation
def a_result_that_was_removed(launcher: Launcher, here: Path) -> None:
    ref = ResultRef.save(0.1, here)
    os.remove(ref.uri)
    ref.load()


@provocation
def a_dataset_that_was_replaced(launcher: Launcher, here: Path) -> None:
    import pyarrow as pa
    import pyarrow.feather

    def read(file: str) -> None:
        import rankzero.train as rt

        pyarrow.feather.write_feather(pa.table({"id": range(10, 20)}), file)
        list(rt.get_dataset_shard().iter_batches(5))

    file = str(here / "rows.arrow")
    pyarrow.feather.write_feather(pa.table({"id": range(10)}), file)
    launcher.options(num_processes=1, dataset=file).run(read, file)


@provocation
def a_checkpoint_that_was_changed(launcher: Launcher, here: Path) -> None:
    def resume() -> Any:
        import rankzero.train as rt

        if checkpoint := rt.get_checkpoint():
            return checkpoint.load()
        rt.report({}, checkpoint={"step": 1})
        rt.await_checkpoint()
        raise ValueError("behind the checkpoint")

    launcher = launcher.options(num_processes=1, run_id="changed")
    with pytest.raises(WorkerFailedError):
        launcher.run(resume)
    [part] = here.glob("**/checkpoints/*/rank-0*")
    part.write_bytes(bytes(part.stat().st_size))
    launcher.run(resume)


@provocation
def a_result_that_was_changed(launcher: Launcher, here: Path) -> None:
    ref = ResultRef.save(0.1, here)
    Path(ref.uri).write_text("0.2")
    ref.load()


@provocation
def no_run_there(launcher: Launcher, here: Path) -> None:
    RunHandle.attach(here / "runs" / "nightyl")


@provocation
def ranks_that_do_not_agree(launcher: Launcher, here: Path) -> None:
    def train() -> str:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        try:
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="gradient")
        except hvd.MismatchError as error:
            return str(error)
        return ""

    import rankzero.compat.horovod.torch as hvd

    raise hvd.MismatchError(launcher.run(train))


@provocation
def a_rank_that_did_not_come(launcher: Launcher, here: Path) -> None:
    def train() -> str:
        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        try:
            hvd.allreduce(torch.ones(2), name="gradient" if hvd.rank() == 0 else "norm")
        except hvd.StallError as error:
            return str(error)
        return ""

    import rankzero.compat.horovod.torch as hvd

    raise hvd.StallError(launcher.run(train))


@provocation
def a_rank_that_stays_away(launcher: Launcher, here: Path) -> None:
    def train(told: str) -> str:
        import time

        import torch

        import rankzero.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            # Its end would be another error.
            while not Path(told).exists():
                time.sleep(0.05)
            return ""
        try:
            hvd.allreduce(torch.ones(2), name="gradient")
        except hvd.StallError as error:
            return str(error)
        finally:
            Path(told).touch()
        return ""

    import rankzero.compat.horovod.torch as hvd

    # Of which one is the bound of making the group, too: a pause of the machine is shorter.
    patient = launcher.options(env={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6"})
    raise hvd.StallError(patient.run(train, str(here / "told")))
