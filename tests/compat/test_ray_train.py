"""Ray Train's guide and names, with only the imports changed."""

import copy
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import until
from torch.utils.data import IterableDataset, TensorDataset

from rankzero import InvalidJobError, Launcher, ResultError, ResultRef, RunHandle, WorkerFailedError
from rankzero.compat.ray_train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TorchConfig,
    TorchTrainer,
    TrainingFailedError,
    dataset,
    session,
    train,
)


def train_func() -> None:
    """Trains nothing."""


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    return RunConfig(storage_path=tmp_path / "results")


def test_the_guides_name_of_torch_config(run_config: RunConfig) -> None:
    with pytest.warns(DeprecationWarning, match="torch_backend is called torch_config"):
        trainer = TorchTrainer(
            train_func, torch_backend=TorchConfig("gloo", timeout_s=60), scaling_config=ScalingConfig(num_workers=2)
        )
    assert trainer.launch_options()["backend"] == "gloo"


def test_a_backend_for_gpus_is_checked_with_the_workers_gpus() -> None:
    nccl = TorchConfig(backend="nccl")
    with_gpu = TorchTrainer(train_func, torch_config=nccl, scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    assert Launcher().options(**with_gpu.launch_options()).backend == "nccl"
    without = TorchTrainer(train_func, torch_config=nccl, scaling_config=ScalingConfig(num_workers=2))
    with pytest.raises(InvalidJobError, match='backend="nccl" needs use_gpu=True'):
        without.fit()


def test_who_a_worker_is(run_config: RunConfig) -> None:
    def loop(config: dict[str, int]) -> Any:
        context = train.get_context()
        mine = [
            context.get_world_rank(), session.get_world_rank(), session.get_local_rank(), context.get_local_rank(),
            context.get_world_size(), session.get_local_world_size(), context.get_experiment_name(),
            str(train.torch.get_device()), config["seven"],
        ]  # fmt: skip
        train.collective.barrier()
        assert train.collective.broadcast_from_rank_zero(context.get_world_rank()) == 0
        from rankzero.train import all_gather_object

        return all_gather_object(mine)

    trainer = TorchTrainer(
        loop, train_loop_config={"seven": 7}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig("who", run_config.storage_path),
    )  # fmt: skip
    found = trainer.fit().return_value
    assert [row[:4] for row in found] == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert found[1][4:] == [2, 2, "who", "cpu", 7]


def test_checkpoints_a_failure_and_another_attempt(tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> int:
        import json
        import os
        import tempfile

        first, attempts = 0, 0
        if checkpoint := train.get_checkpoint():
            with checkpoint.as_directory() as directory, open(os.path.join(directory, "state.json")) as file:
                state = json.load(file)
            first, attempts = state["epoch"] + 1, state["attempts"] + 1
        for epoch in range(first, 4):
            with tempfile.TemporaryDirectory() as directory:
                with open(os.path.join(directory, "state.json"), "w") as file:
                    json.dump({"epoch": epoch, "attempts": attempts}, file)
                is_first = train.get_context().get_world_rank() == 0
                given = Checkpoint.from_directory(directory) if is_first else None
                train.report({"score": [3.0, 9.0, 1.0, 5.0][epoch]}, checkpoint=given)
            if epoch == 1 and attempts == 0:
                from rankzero.train import barrier

                barrier()
                while train.get_checkpoint() is None:
                    pass
                raise ValueError("out of luck")
        return first

    config = RunConfig(
        storage_path=tmp_path,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score"),
    )
    result = TorchTrainer(loop, train_loop_config={}, run_config=config).fit()
    assert result.return_value in (1, 2)
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [5.0, 9.0], "the best is last, as in Ray"
    assert result.checkpoint is not None
    state = Path(result.checkpoint.to_directory(tmp_path / "copy"), "state.json").read_text()
    assert '"epoch": 3' in state
    best = result.get_best_checkpoint("score", "max")
    assert best is not None
    with best.as_directory() as directory:
        assert '"epoch": 1' in Path(directory, "state.json").read_text()
    assert Result.from_path(result.path).return_value == result.return_value


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_a_diverged_checkpoint_is_the_worst(tmp_path: Path, mode: str, best: int) -> None:
    kept = [(Checkpoint(tmp_path / str(n)), {"loss": loss}) for n, loss in enumerate([math.nan, 0.5, 0.9])]
    assert Result({}, None, None, str(tmp_path), kept, None).get_best_checkpoint("loss", mode) is kept[best][0]


def test_as_many_workers_as_there_is_room_for(run_config: RunConfig) -> None:
    trainer = TorchTrainer(
        lambda: train.get_context().get_world_size(),
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=run_config,
    )
    assert trainer.fit().return_value == 2


def test_no_worker_in_a_rank_of_torchrun_is_refused(run_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0), run_config=run_config)
    with pytest.raises(InvalidJobError, match="num_workers is 0 in a rank of torchrun: start the script with python"):
        trainer.fit()


def test_a_failure_raises_and_is_in_the_result(run_config: RunConfig, tmp_path: Path) -> None:
    def loop() -> None:
        train.report({"loss": 1.0})
        raise ValueError("no such column")

    with pytest.raises(TrainingFailedError, match="no such column") as failure:
        TorchTrainer(loop, run_config=RunConfig("broken", tmp_path)).fit()
    assert isinstance(failure.value, WorkerFailedError)
    result = Result.from_path(str(tmp_path / "broken"))
    assert "no such column" in str(result.error)
    assert result.metrics == {"loss": 1.0}


def test_the_metrics_are_those_of_rank_0s_last_report(run_config: RunConfig) -> None:
    def loop() -> None:
        train.report({"accuracy": 0.5, "loss": 2.0})
        train.report({"loss": 1.0, "rank": train.get_context().get_world_rank()})

    trainer = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run_config)
    result = trainer.fit()
    assert result.metrics == {"loss": 1.0, "rank": 0}
    assert Result.from_path(result.path).metrics == {"loss": 1.0, "rank": 0}
    columns = Result.from_path(result.path).metrics_dataframe.columns
    assert list(columns) == ["time", "accuracy", "loss", "rank"]


def test_metrics_that_are_no_numbers_or_strings_are_left_out_with_one_line_each(run_config: RunConfig) -> None:
    def loop() -> None:
        import numpy

        for _ in range(2):
            train.report({"loss": 1, "norm": numpy.float32(2), "empty": None, "classes": [0.1], "more": {"a": 1}})

    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run_config).fit()
    assert result.metrics == {"loss": 1, "norm": 2.0}
    lines = list(RunHandle.attach(result.path).logs(rank=0))
    assert [sum(f"'{name}'" in line for line in lines) for name in ("empty", "classes", "more", "norm")] == [1, 1, 1, 0]


def test_a_share_of_a_data_set(run_config: RunConfig) -> None:
    def loop() -> Any:
        shard = train.get_dataset_shard("train")
        rows = [int(row) for [batch] in shard.iter_torch_batches(batch_size=3) for row in batch]
        with pytest.raises(KeyError, match="the trainer has no data set 'test'.*gave: train"):
            train.get_dataset_shard("test")
        from rankzero.train import all_gather_object

        return all_gather_object(rows)

    shares = TorchTrainer(
        loop,
        scaling_config=ScalingConfig(2),
        datasets={"train": TensorDataset(torch.arange(10))},
        run_config=run_config,
    ).fit()
    assert sorted(shares.return_value[0] + shares.return_value[1]) == list(range(10))


def test_a_share_has_another_order_in_each_epoch() -> None:
    dataset.install({"train": range(50), "test": range(50)})

    def epoch(name: str) -> list[int]:
        return next(dataset.shard(name).iter_torch_batches(local_shuffle_buffer_size=50)).tolist()

    first, second = epoch("train"), epoch("train")
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert epoch("test") == first, "each data set has epochs of its own"
    dataset.install({"train": range(50)})
    assert epoch("train") == first, "the next training begins at the first"


def test_a_stream_cannot_be_shuffled() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    dataset.install({"train": Stream()})
    with pytest.raises(ValueError, match="local_shuffle_buffer_size is 9, but the data set 'train' is an Iterable"):
        dataset.shard("train").iter_torch_batches(local_shuffle_buffer_size=9)


def test_a_trainer_is_a_training_for_any_launcher(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        lambda config: train.get_context().get_world_size() * config["lr"],
        train_loop_config={"lr": 0.5},
        scaling_config=ScalingConfig(num_workers=2),
    )
    launcher = Launcher(store=tmp_path)
    assert launcher.run(trainer) == 1.0
    assert launcher.identity(trainer, (), {}) == launcher.identity(trainer, (), {}) != ""
    other = TorchTrainer(
        trainer.train_loop_per_worker, train_loop_config={"lr": 0.25}, scaling_config=ScalingConfig(num_workers=2)
    )
    assert launcher.identity(other, (), {}) != launcher.identity(trainer, (), {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchTrainer("train.py"), "must be a function"),
        (lambda: TorchTrainer(lambda a, b: 0), "has several arguments"),
        (lambda: TorchTrainer(train_func, metadata={}), "metadata is not supported: use Launcher"),
        (lambda: TorchTrainer(train_func, scaling_config={"num_workers": 2}), "scaling_config is a dict"),
        (lambda: ScalingConfig(num_workers=-2), "num_workers is -2; it must be a whole number"),
        (lambda: ScalingConfig(num_workers="2"), "num_workers is '2'"),
        (lambda: ScalingConfig(num_workers=(3, 1)), "num_workers is \\(3, 1\\)"),
        (lambda: RunConfig(failure_config={"max_failures": 3}), "failure_config is a dict; give .*FailureConfig"),
        (lambda: RunConfig(checkpoint_config=3), "checkpoint_config is a int; give .*CheckpointConfig"),
        (lambda: ScalingConfig(trainer_resources={"CPU": 1}), "the process that calls fit"),
        (lambda: ScalingConfig(resources_per_worker={"GPU": 0.5}), "one GPU or none"),
        (lambda: ScalingConfig(resources_per_worker={"TPU": 1}), "resources_per_worker has TPU"),
        (lambda: RunConfig(verbose=1), "verbose is not supported"),
        (lambda: RunConfig(storage_path="s3://a/b?region=c"), "region=c in storage_path is not supported: use the env"),
        (lambda: ScalingConfig(topology="4x4"), "topology, is not supported: there are no TPUs"),
        (lambda: RunConfig(worker_runtime_env={"pip": []}), "install packages on the executors"),
        (lambda: FailureConfig(fail_fast=True), "fail_fast"),
        (lambda: FailureConfig(max_failures=-2), "-1 \\(no limit\\)"),
        (lambda: CheckpointConfig(checkpoint_at_end=True), "train.report"),
        (lambda: CheckpointConfig(checkpoint_score_order="best"), "mode is 'best'"),
        (lambda: TorchConfig(backend="mpi"), "backend is 'mpi'"),
    ],
)
def test_what_has_no_meaning_here_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message) as caught:
        make()
    assert isinstance(caught.value, DeprecationWarning) == ("is not supported" in str(caught.value)), "Ray's type"


def counting(config: dict[str, Any]) -> int:
    """Goes on from the checkpoint, reports two more, and fails if it is told to."""
    import os
    import tempfile

    first = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "number").read_text())
    for number in (first + 1, first + 2):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "number").write_text(str(number))
            at = Checkpoint.from_directory(folder) if train.get_context().get_world_rank() == 0 else None
            train.report({"number": number}, checkpoint=at)
    if config.get("fails"):
        train.collective.barrier()
        os._exit(3)
    return first


def test_a_name_again_resumes_from_its_last_checkpoint_whatever_has_changed(tmp_path: Path) -> None:
    def trainer(workers: int, **config: Any) -> TorchTrainer:
        run = RunConfig("named", tmp_path, checkpoint_config=CheckpointConfig(num_to_keep=None))
        return TorchTrainer(
            counting, train_loop_config=config, scaling_config=ScalingConfig(num_workers=workers), run_config=run
        )

    def numbers() -> list[str]:
        return sorted(folder.name for folder in (tmp_path / "named" / "checkpoints").iterdir())

    with pytest.raises(TrainingFailedError):
        trainer(1, fails=True, lr=0.1).fit()
    before = numbers()
    assert before
    firsts = [trainer(1, lr=0.2).fit().return_value]
    # After a success, with nothing changed; then with another number of workers.
    firsts.append(trainer(1, lr=0.2).fit().return_value)
    result = trainer(2, lr=0.2).fit()
    firsts.append(result.return_value)
    assert firsts[1:] == [firsts[0] + 2, firsts[0] + 4]
    assert firsts[0] in (1, 2)
    assert set(before) <= set(numbers()), "what was reported stays"
    assert result.metrics == {"number": firsts[2] + 2}


def restored(config: dict[str, Any]) -> int:
    """Ray's example of a restore: each worker reports the epoch, and raises behind the second one."""
    import tempfile
    import time

    first = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "epoch").read_text()) + 1
    for epoch in range(first, 3):
        if train.get_context().get_world_rank() == 0:
            # The other worker would be far ahead by now.
            time.sleep(0.5)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch").write_text(str(epoch))
            train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))
        if epoch == 1:
            raise RuntimeError("to be restored")
    return first


def test_a_worker_that_raises_behind_a_report_is_restored_from_it(run_config: RunConfig) -> None:
    run_config = RunConfig("restored", run_config.storage_path, failure_config=FailureConfig(max_failures=1))
    trainer = TorchTrainer(
        restored, scaling_config=ScalingConfig(num_workers=2), run_config=run_config,
        # With time for the write of what was reported right before the failure.
        launcher=Launcher(stop_grace=60),
    )  # fmt: skip
    assert trainer.fit().return_value == 2


def of_each_worker(config: dict[str, Any]) -> Any:
    """Ray's guide of sharded checkpoints: each worker saves a file of its own name."""
    import tempfile

    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"model-rank={rank}.pt").write_text("shard")
        given = Checkpoint.from_directory(folder) if rank in config["workers"] else None
        train.report({"loss": 1.0}, checkpoint=given)
    from rankzero.train import all_gather_object

    checkpoint = train.get_checkpoint()
    assert checkpoint is not None
    return all_gather_object(sorted(os.listdir(checkpoint.path)))


@pytest.mark.parametrize("workers", [pytest.param([0, 1], marks=pytest.mark.soak), [1]])
def test_the_checkpoint_has_the_files_of_all_workers(run_config: RunConfig, workers: list[int]) -> None:
    trainer = TorchTrainer(
        of_each_worker,
        train_loop_config={"workers": workers},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config,
    )
    result = trainer.fit()
    expected = [f"model-rank={rank}.pt" for rank in workers]
    assert result.checkpoint is not None
    assert sorted(os.listdir(result.checkpoint.path)) == expected
    assert result.return_value == [expected] * 2, "a worker has the files of all, too"


def sharded(config: dict[str, Any]) -> None:
    """Each worker reports its own file, and one that all have."""
    import tempfile

    import rankzero.train as rt

    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").mkdir()
        Path(folder, "weights", config["name"].format(rank)).write_text(f"shard {rank}")
        Path(folder, "config.json").write_text("{}")
        rt.report({"loss": 1.0}, checkpoint=folder, sharded=True)


def shards_of(run_config: RunConfig, name: str) -> Checkpoint:
    scaling = ScalingConfig(num_workers=2)
    found = TorchTrainer(sharded, train_loop_config={"name": name}, scaling_config=scaling, run_config=run_config).fit()
    assert found.checkpoint is not None
    return found.checkpoint


def test_the_checkpoint_of_a_result_has_the_files_of_all_workers(run_config: RunConfig) -> None:
    with shards_of(run_config, "model-rank={}.pt").as_directory() as folder:
        found = {str(path.relative_to(folder)): path.read_text() for path in Path(folder).rglob("*") if path.is_file()}
    assert found == {"config.json": "{}", "weights/model-rank=0.pt": "shard 0", "weights/model-rank=1.pt": "shard 1"}


def test_different_files_of_workers_that_have_one_name_are_refused(run_config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="has a weights/model.pt of rank 0 and another one of rank 1"):
        shards_of(run_config, "model.pt").to_directory(tmp_path / "copy")


def reporting_until(release: str) -> str:
    import time

    train.report({"loss": 0.5})
    while not os.path.exists(release):
        time.sleep(0.02)
    return "done"


def test_a_live_run_has_the_result_that_it_has_reported_so_far(tmp_path: Path) -> None:
    """And whoever reads it does not keep it alive."""
    release = tmp_path / "release"
    handle = Launcher(1, store=tmp_path / "runs", orphan_timeout=600).submit(reporting_until, str(release))
    until(lambda: RunHandle.attach(handle.directory, follows=False).metrics(), 60, "a report")
    lease = Path(handle.directory, "lease")
    before = lease.exists() and lease.read_bytes()
    live = Result.from_path(handle.directory)
    assert (live.metrics, live.return_value, live.error) == ({"loss": 0.5}, None, None)
    assert (lease.exists() and lease.read_bytes()) == before
    release.touch()
    assert handle.result(timeout=60) == "done"
    assert Result.from_path(handle.directory).return_value == "done"


class StepTry:
    """The only try of a pipeline step."""

    is_followed_by_another = False
    lease_when_attached = None
    retrier = None
    generation = "monday"

    def has_accepted(self, receiver: Any) -> bool:
        return False

    def repeats(self, receiver: Any) -> bool:
        return False

    def detaches(self, error: BaseException) -> bool:
        return False


def test_the_run_of_a_pipeline_step_is_the_steps_whatever_name_its_trainer_has(tmp_path: Path) -> None:
    named = RunConfig(name="daily", storage_path=str(tmp_path / "of-the-trainer"))
    trainer = TorchTrainer(counting, train_loop_config={"fail": False, "last": 1}, run_config=named)
    for step in ("monday", "tuesday"):
        launcher = Launcher(1, store=tmp_path / "of-the-step", run_id=step)
        with launcher.durable(trainer, (), {}, StepTry(), logging.getLogger(__name__)) as opened:
            opened.handle.wait()
        assert opened.handle.directory == str(tmp_path / "of-the-step" / step)
        assert opened.handle.status().state == "succeeded"
    assert not (tmp_path / "of-the-trainer").exists()


def token_of_worker() -> str | None:
    return os.environ.get("TOKEN_OF_A_SERVICE")


def test_the_environment_of_workers_is_in_no_file_of_the_run(tmp_path: Path) -> None:
    # Not in this source, which is shipped with the run.
    secret = "-".join(["very", "secret", "4711"])
    env = {"env_vars": {"TOKEN_OF_A_SERVICE": secret}}
    config = RunConfig(storage_path=str(tmp_path), worker_runtime_env=env)
    trainer = copy.deepcopy(TorchTrainer(token_of_worker, run_config=config))
    assert trainer.fit().return_value is not None
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "result" not in path.parts]
    assert [path.name for path in files if path.name.startswith("payload")]
    # The status has a small value: that the worker returned it is the proof that it had it.
    held = [
        path
        for path in files
        if secret.encode() in path.read_bytes() and path.name not in ("status.json", "outcome.json")
    ]
    assert held == []


def test_references_in_the_configuration_are_opened_in_the_workers(run_config: RunConfig, tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        from rankzero.train import all_gather_object

        assert config["model"] is config["list"][0], "what was given twice is one object"
        return all_gather_object(config)

    def trainer(value: Any, folder: str) -> TorchTrainer:
        ref = ResultRef.save(value, tmp_path / folder)
        config = {"model": ref, "list": [ref], "lr": 0.5}
        scaling = ScalingConfig(num_workers=2)
        return TorchTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=run_config)

    first = trainer([1, 2], "values")
    assert first.fit().return_value == [{"model": [1, 2], "list": [[1, 2]], "lr": 0.5}] * 2
    launcher = Launcher(store=tmp_path)
    moved, other = (launcher.identity(trainer(*of), (), {}) for of in (([1, 2], "elsewhere"), ([3], "values")))
    assert moved == launcher.identity(first, (), {}) != other, "a reference counts by its content"
