"""Ray Train's guides and behaviours, with only the imports changed; its checkpoints, results and data."""

import copy
import logging
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import rankzero.train as rt
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
    session,
    train,
)

FitsLoop = Callable[..., Result]

ROWS = 16


@pytest.fixture
def fit(tmp_path: Path) -> FitsLoop:
    """Returns a function that trains with a run config and other arguments of the trainer."""

    def fit(loop: Any, config: Any = None, workers: Any = 2, run: dict[str, Any] | None = None, **more: Any) -> Result:
        run_config = RunConfig(**{"name": "run", "storage_path": tmp_path / "runs", **(run or {})})
        # With time for the write of what was reported right before a failure.
        options = {"launcher": Launcher(stop_grace=60), "scaling_config": ScalingConfig(num_workers=workers), **more}
        return TorchTrainer(loop, train_loop_config=config or {}, run_config=run_config, **options).fit()

    return fit


def save(folder: str, text: object, name: str = "state") -> Checkpoint:
    Path(folder, name).write_text(str(text))
    return Checkpoint.from_directory(folder)


def saved(default: int = 0) -> int:
    """Returns the number in the checkpoint that this attempt starts from."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return default
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "state").read_text())


def test_who_a_worker_is(fit: FitsLoop, tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        context = train.get_context()
        return rt.all_gather_object([
            context.get_world_rank(), session.get_world_rank(), session.get_local_rank(), context.get_local_rank(),
            context.get_world_size(), session.get_local_world_size(), context.get_experiment_name(),
            str(train.torch.get_device()), os.environ["ACCELERATE_USE_CPU"], config,
        ])  # fmt: skip

    ref = ResultRef.save([1, 2], tmp_path / "values")
    found = fit(loop, {"model": ref, "list": [ref], "lr": 0.5}).return_value
    assert [row[:4] for row in found] == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert found[1][4:-1] == [2, 2, "run", "cpu", "true"]
    assert found[1][-1] == {"model": [1, 2], "list": [[1, 2]], "lr": 0.5}, "references are opened in the workers"


def scored(config: dict[str, Any]) -> Any:
    """Rank 0 alone reports a checkpoint for each score; every worker asks for it right behind."""
    seen = []
    for score in config["scores"]:
        with tempfile.TemporaryDirectory() as folder:
            is_first = train.get_context().get_world_rank() == 0
            train.report({"score": score}, checkpoint=save(folder, score) if is_first else None)
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        seen.append(Path(checkpoint.path, "state").read_text())
    return rt.all_gather_object(seen), train.get_checkpoint()


def test_a_worker_gets_the_checkpoint_that_was_just_reported(fit: FitsLoop, tmp_path: Path) -> None:
    kept = CheckpointConfig(2, checkpoint_score_attribute="score")
    result = fit(scored, {"scores": [3.0, 1.0, 2.0]}, run={"checkpoint_config": kept})
    seen, returned = result.return_value
    assert seen == [["3.0", "1.0", "2.0"]] * 2
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [2.0, 3.0], "the best is last, as in Ray"
    for checkpoint in (returned, result.checkpoint, pickle.loads(pickle.dumps(result)).checkpoint):
        assert Path(checkpoint.to_directory(tmp_path / "copy"), "state").read_text() == "2.0", "the newest"
    best = result.get_best_checkpoint("score", "max")
    assert best is not None
    assert Path(best.path, "state").read_text() == "3.0"
    with pytest.raises(RuntimeError, match="no kept checkpoint was reported with a metric 'loss'"):
        result.get_best_checkpoint("loss", "min")


def test_a_checkpoint_that_is_not_kept_says_so_and_leaves_nothing(
    fit: FitsLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fit(scored, {"scores": [1.0]}, workers=1, run={"checkpoint_config": CheckpointConfig(1)})
    fit(scored, {"scores": [2.0]}, workers=1, run={"checkpoint_config": CheckpointConfig(1)})
    assert result.checkpoint is not None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    with pytest.raises(ResultError, match="was deleted, since it is not kept"):
        result.checkpoint.to_directory()
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_a_diverged_checkpoint_is_the_worst(tmp_path: Path, mode: str, best: int) -> None:
    kept = [(Checkpoint(tmp_path / str(n)), {"loss": loss}) for n, loss in enumerate([math.nan, 0.5, 0.9])]
    assert Result({}, None, None, str(tmp_path), kept, None).get_best_checkpoint("loss", mode) is kept[best][0]


def counting(config: dict[str, Any]) -> int:
    """Continues from the checkpoint, and reports two more; each worker then raises, or ends, once."""
    first = saved()
    for number in (first + 1, first + 2):
        with tempfile.TemporaryDirectory() as folder:
            train.report({"number": number}, checkpoint=save(folder, number))
    if first == 0 and "raises" in config:
        raise ValueError("out of luck")
    if "ends" in config:
        rt.barrier()
        os._exit(3)
    return first


def test_a_worker_that_raises_behind_a_report_restarts_from_it(fit: FitsLoop) -> None:
    result = fit(counting, {"raises": True}, run={"failure_config": FailureConfig(max_failures=1)})
    assert (result.return_value, result.metrics) == (2, {"number": 4})


def test_a_name_again_resumes_from_its_last_checkpoint_whatever_has_changed(fit: FitsLoop, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError):
        fit(counting, {"ends": True, "lr": 0.1}, workers=1)
    # After a success, with nothing changed; then with another number of workers.
    firsts = [fit(counting, {"lr": 0.2}, workers=workers).return_value for workers in (1, 1, (1, 2))]
    assert firsts[0] in (1, 2)
    assert firsts[1:] == [firsts[0] + 2, firsts[0] + 4]
    kept = list((tmp_path / "runs" / "run").glob("submissions/*/checkpoints/*"))
    assert len(kept) == firsts[2] + 2, "what was reported stays"


def test_a_checkpoint_that_a_loop_does_not_ask_for_is_named_once(fit: FitsLoop) -> None:
    def loop() -> None:
        with tempfile.TemporaryDirectory() as folder:
            train.report({}, save(folder, 1))
            train.report({})

    fit(loop)
    lines = list(RunHandle.attach(fit(loop).path).logs(rank=0))
    assert sum("get_checkpoint() was not called, so nothing resumes from checkpoint" in line for line in lines) == 1


def test_a_failure_raises_and_is_in_the_result(fit: FitsLoop, tmp_path: Path) -> None:
    def loop() -> None:
        train.report({"loss": 1.0})
        raise ValueError("no such column")

    with pytest.raises(TrainingFailedError, match="no such column") as failure:
        fit(loop)
    assert isinstance(failure.value, WorkerFailedError)
    result = Result.from_path(tmp_path / "runs" / "run")
    assert "no such column" in str(result.error)
    assert result.metrics == {"loss": 1.0}


def test_metrics_are_the_numbers_and_texts_of_rank_0s_last_report(fit: FitsLoop) -> None:
    def loop() -> None:
        import numpy

        train.report({"accuracy": 0.5, "loss": 2.0})
        for _ in range(2):
            train.report({"loss": 1, "rank": rt.get_context().rank, "norm": numpy.float32(2), "empty": None, "of": [1]})

    result = fit(loop)
    assert result.metrics == {"loss": 1, "rank": 0, "norm": 2.0}
    assert Result.from_path(result.path).metrics == result.metrics
    assert list(result.metrics_dataframe.columns) == ["time", "accuracy", "loss", "rank", "norm"]
    lines = list(RunHandle.attach(result.path).logs(rank=0))
    assert [sum(f"'{name}'" in line for line in lines) for name in ("empty", "of", "norm")] == [1, 1, 0]


def of_each_worker(config: dict[str, Any]) -> Any:
    """Some workers save a file of their own name, and one that all have."""
    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, rank, "common")
        given = save(folder, rank, f"model-rank={rank}.pt") if rank in config["ranks"] else None
        train.report({"loss": 1.0}, checkpoint=given, sharded=config["sharded"])
    checkpoint = train.get_checkpoint()
    assert checkpoint is not None
    return rt.all_gather_object({path.name: path.read_text() for path in Path(checkpoint.path).iterdir()})


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_is_rank_0s_or_has_the_files_of_all_workers(fit: FitsLoop, sharded: bool) -> None:
    if not sharded:
        with pytest.raises(TrainingFailedError, match="files that rank 0's checkpoint lacks.*sharded=True"):
            fit(of_each_worker, {"ranks": [0, 1], "sharded": False})
    result = fit(of_each_worker, {"ranks": [0, 1] if sharded else [0], "sharded": sharded})
    expected = {"common": "0", "model-rank=0.pt": "0", **({"model-rank=1.pt": "1"} if sharded else {})}
    assert result.return_value == [expected] * 2
    assert result.checkpoint is not None
    assert {path.name: path.read_text() for path in Path(result.checkpoint.path).iterdir()} == expected


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_that_lacks_a_workers_part_is_refused(fit: FitsLoop, sharded: bool) -> None:
    with pytest.raises(TrainingFailedError, match="rank 1 reported a checkpoint, and rank 0 none: report one"):
        fit(of_each_worker, {"ranks": [1], "sharded": sharded})


def test_a_trainer_is_a_training_for_any_launcher(tmp_path: Path) -> None:
    def trainer(lr: float) -> TorchTrainer:
        return TorchTrainer(
            lambda config: train.get_context().get_world_size() * config["lr"],
            train_loop_config={"lr": lr},
            scaling_config=ScalingConfig(num_workers=2),
        )

    launcher = Launcher(store=tmp_path)
    assert launcher.run(trainer(0.5)) == 1.0
    one, same, other = (launcher.identity(trainer(lr), (), {}) for lr in (0.5, 0.5, 0.25))
    assert one == same != other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchTrainer("train.py"), "must be a function"),  # type: ignore[arg-type]
        (lambda: TorchTrainer(print, metadata={}), r"no TorchTrainer\(metadata\): see docs/migrate.md#ray-train"),
        (lambda: TorchTrainer(print, scaling_config={"num_workers": 2}), "scaling_config is a dict"),  # type: ignore[arg-type]
        (lambda: ScalingConfig(num_workers=0), "num_workers is 0; it must be a positive integer"),
        (lambda: ScalingConfig(num_workers=(3, 1)), "num_workers is \\(3, 1\\)"),
        (lambda: ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}), "use_gpu is True, but .* has GPU=0"),
        (lambda: ScalingConfig(resources_per_worker={"GPU": 1}), "use_gpu is False, but .* has GPU=1"),
        (lambda: ScalingConfig(resources_per_worker={"TPU": 1}), r"no resources_per_worker\(TPU\)"),
        (lambda: RunConfig(failure_config={"max_failures": 3}), "failure_config is a dict; give .*FailureConfig"),
        (lambda: RunConfig(worker_runtime_env={"pip": []}), r"no worker_runtime_env\(pip\)"),
        (lambda: Checkpoint("s3://bucket/state"), "a URL: see docs/migrate.md#ray-train"),
        (lambda: train.report({}, validation=True), r"no report\(validation\)"),
        (lambda: TorchTrainer(print, torch_config=TorchConfig("nccl")).fit(), 'backend="nccl" needs use_gpu=True'),
    ],
)
def test_what_does_not_exist_here_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        make()


def test_the_run_of_a_pipeline_step_is_the_steps_whatever_name_its_trainer_has(tmp_path: Path) -> None:
    named = RunConfig(name="daily", storage_path=str(tmp_path / "of-the-trainer"))
    trainer = TorchTrainer(counting, run_config=named)
    facts = {"is_followed_by_another": False, "lease_when_attached": None, "retrier": None, "generation": "monday"}
    answers = dict.fromkeys(("has_accepted", "repeats", "detaches"), lambda asked: False)
    only_try: Any = SimpleNamespace(**facts, **answers)
    for step in ("monday", "tuesday"):
        launcher = Launcher(1, store=tmp_path / "of-the-step", run_id=step)
        with launcher.durable(trainer, (), {}, only_try, logging.getLogger(__name__)) as opened:
            opened.handle.wait()
        assert opened.handle.directory == str(tmp_path / "of-the-step" / step)
        assert opened.handle.status().state == "succeeded"
    assert not (tmp_path / "of-the-trainer").exists()


def test_the_environment_of_workers_is_in_no_file_of_the_run(tmp_path: Path) -> None:
    # Not in this source, which is shipped with the run.
    secret = "-".join(["very", "secret", "4711"])
    config = RunConfig(storage_path=tmp_path, worker_runtime_env={"env_vars": {"TOKEN_OF_A_SERVICE": secret}})
    trainer = copy.deepcopy(TorchTrainer(lambda: len(os.environ["TOKEN_OF_A_SERVICE"]), run_config=config))
    assert trainer.fit().return_value == len(secret)
    files: Iterator[Path] = (path for path in tmp_path.rglob("*") if path.is_file())
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": list(range(ROWS)), "name": [str(n) for n in range(ROWS)]}), path)
    return path


def in_rays_spelling() -> Any:
    shard = train.get_dataset_shard()
    [all_rows] = shard.iter_torch_batches(batch_size=None, dtypes=torch.float16)
    [typed] = shard.iter_torch_batches(batch_size=ROWS, dtypes={"x": torch.int8}, device="cpu", pin_memory=True)
    [made] = shard.iter_torch_batches(batch_size=ROWS, collate_fn=lambda arrays: (type(arrays["x"]), arrays["x"] + 1))
    shuffled = shard.iter_torch_batches(batch_size=5, local_shuffle_buffer_size=ROWS, drop_last=True)
    epochs = [[batch["x"].tolist() for batch in shuffled] for _ in range(2)]
    with pytest.raises(InvalidJobError, match="no dataset 'test'.*has: train"):
        train.get_dataset_shard("test")
    return all_rows, typed["x"].dtype, made[0], made[1].tolist(), epochs


def test_batches_in_rays_spelling(fit: FitsLoop, table: str) -> None:
    all_rows, typed, kind, made, epochs = fit(in_rays_spelling, workers=1, datasets={"train": table}).return_value
    assert (all_rows["x"].dtype, all_rows["name"][:2]) == (torch.float16, ["0", "1"]), "texts have no other type"
    assert (typed, kind, made) == (torch.int8, numpy.ndarray, list(range(1, ROWS + 1)))
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[5] * 3] * 2
    assert epochs[0] != epochs[1], "each iteration is an epoch, with an order of its own"


def test_workers_share_the_rows_of_a_table(fit: FitsLoop, table: str) -> None:
    def loop() -> Any:
        batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=3)
        return rt.all_gather_object([row for batch in batches for row in batch["x"].tolist()])

    first, second = fit(loop, datasets={"train": table}).return_value
    assert sorted(first + second) == list(range(ROWS))


class Shards(IterableDataset[int]):
    """Yields the rows of this worker's shards, as Ray's guides expect of a data set without indices."""

    def __iter__(self) -> Iterator[int]:
        context = train.get_context()
        return iter(range(context.get_world_rank(), ROWS, context.get_world_size()))


def test_an_iterable_data_set_that_shares_itself_out_is_left_alone(fit: FitsLoop) -> None:
    def loop() -> list[list[int]]:
        loader = train.torch.prepare_data_loader(DataLoader(Shards(), batch_size=3))
        return rt.all_gather_object([int(row) for batch in loader for row in batch])

    assert fit(loop).return_value == [list(range(0, ROWS, 2)), list(range(1, ROWS, 2))]


def test_without_a_distributed_sampler_each_worker_draws_by_itself(fit: FitsLoop) -> None:
    def loop() -> list[Any]:
        found = []
        for options in ({"sampler": WeightedRandomSampler(torch.ones(1000), 8)}, {"shuffle": True}):
            plain: Any = DataLoader(range(1000), 8, **options)  # type: ignore[arg-type]
            prepared = train.torch.prepare_data_loader(plain, add_dist_sampler=False)
            drawn = []
            for loader in (plain, prepared):
                torch.manual_seed(train.get_context().get_world_rank())
                drawn.append([batch.tolist() for _ in range(2) for batch in loader])
            found.append(drawn)
        return rt.all_gather_object(found)

    for first, second in zip(*fit(loop).return_value, strict=True):
        assert [plain == prepared for plain, prepared in (first, second)] == [True, True]
        assert first != second


def test_drop_last_drops_only_a_batch_that_is_not_full(fit: FitsLoop) -> None:
    def loop() -> list[list[int]]:
        loader: Any = DataLoader(range(19), 10, drop_last=True)  # type: ignore[arg-type]
        return rt.all_gather_object([int(row) for batch in train.torch.prepare_data_loader(loader) for row in batch])

    # As torch's DistributedSampler pads 19 rows to 20.
    assert fit(loop).return_value == [list(range(0, 19, 2)), [*range(1, 19, 2), 0]]
