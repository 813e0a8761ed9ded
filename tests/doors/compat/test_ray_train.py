"""Ray Train's guides and behaviours, with only the imports changed; its checkpoints, results and data."""

import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.tries.identities import identity_by
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher, ResultRef, RunHandle, WorkerFailedError
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
from rankzero.compat.ray_train.config import ABSENT, UnsupportedError
from rankzero.pipeline import open_run

FitsLoop = Callable[..., Result]

ROWS = 16


@pytest.fixture
def fit(tmp_path: Path) -> FitsLoop:
    """Returns a function that trains with a run config and other arguments of the trainer."""

    def fit(loop: Any, config: Any = None, workers: Any = 2, run: Any = None, datasets: Any = None) -> Result:
        run_config = RunConfig(**{"name": "run", "storage_path": tmp_path / "runs", **(run or {})})
        # With time for the write of what was reported right before a failure.
        given: Any = {"launcher": Launcher(stop_grace=60), "run_config": run_config, "datasets": datasets}
        return TorchTrainer(loop, train_loop_config=config, scaling_config=ScalingConfig(workers), **given).fit()

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


def get_started() -> Any:
    import rankzero.compat.ray_train as ray

    model = ray.train.torch.prepare_model(nn.Linear(4, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    train_loader: Any = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=4, shuffle=True)
    train_loader = ray.train.torch.prepare_data_loader(train_loader)
    for epoch in range(2):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(temp_checkpoint_dir))
    return model.module.state_dict()


# Without a launcher it is the active SparkSession.
@pytest.mark.parametrize("fixtures", [[], ["session"]], ids=["here", "spark"])
def test_rays_page_for_pytorch(fixtures: list[str], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    import rankzero.compat.ray_train as ray

    for name in fixtures:
        request.getfixturevalue(name)

    trainer = ray.train.torch.TorchTrainer(
        get_started,
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    assert (result.metrics["epoch"], result.error, len(result.best_checkpoints)) == (1, None, 2)
    with result.checkpoint.as_directory() as checkpoint_dir:
        nn.Linear(4, 1).load_state_dict(torch.load(os.path.join(checkpoint_dir, "model.pt")))
    assert list(result.return_value) == list(nn.Linear(4, 1).state_dict()), "tensors are allowed"


def test_who_a_worker_is(fit: FitsLoop, tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        context = train.get_context()
        return rt.all_gather_object([
            context.get_world_rank(), session.get_world_rank(), session.get_local_rank(), context.get_local_rank(),
            context.get_world_size(), session.get_local_world_size(), context.get_experiment_name(),
            str(train.torch.get_device()), os.environ["ACCELERATE_USE_CPU"], os.environ["SERVICE"], config,
        ])  # fmt: skip

    ref = ResultRef.save([1, 2], tmp_path / "values")
    variables = {"env_vars": {"SERVICE": "of-the-trainer"}}
    found = fit(loop, {"model": ref, "list": [ref], "lr": 0.5}, run={"worker_runtime_env": variables}).return_value
    assert [row[:4] for row in found] == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert found[1][4:-1] == [2, 2, "run", "cpu", "true", "of-the-trainer"]
    assert found[1][-1] == {"model": [1, 2], "list": [[1, 2]], "lr": 0.5}, "references are handle in the workers"


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
    with pytest.raises(TrainingFailedError) as failure:
        fit(counting, {"ends": True, "lr": 0.1}, workers=1)
    assert isinstance(failure.value, WorkerFailedError)
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


def test_metrics_are_the_numbers_and_texts_of_rank_0s_last_report(fit: FitsLoop) -> None:
    def loop() -> None:
        import numpy

        train.report({"accuracy": 0.5, "loss": 2.0})
        for _ in range(2):
            train.report({"loss": 1, "rank": rt.get_context().rank, "norm": numpy.float32(2), "empty": None, "of": [1]})

    result = fit(loop)
    assert result.metrics == {"loss": 1, "rank": 0, "norm": 2.0}
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
    result = fit(of_each_worker, {"ranks": [0, 1] if sharded else [0], "sharded": sharded})
    expected = {"common": "0", "model-rank=0.pt": "0", **({"model-rank=1.pt": "1"} if sharded else {})}
    assert result.return_value == [expected] * 2
    with pytest.raises(TrainingFailedError, match="rank 1 reported a checkpoint, and rank 0 none: report one"):
        fit(of_each_worker, {"ranks": [1], "sharded": sharded})
    if not sharded:
        with pytest.raises(TrainingFailedError, match=r"rank 0's checkpoint lacks model-rank=1\.pt of other ranks"):
            fit(of_each_worker, {"ranks": [0, 1], "sharded": sharded})


def test_a_trainer_is_a_training_for_any_launcher(tmp_path: Path) -> None:
    def trainer(lr: float) -> TorchTrainer:
        return TorchTrainer(lambda config: config["lr"], train_loop_config={"lr": lr})

    launcher = Launcher(store=tmp_path)
    assert launcher.run(trainer(0.5)) == 0.5
    one, same, other = (identity_by(launcher, trainer(lr), (), {}) for lr in (0.5, 0.5, 0.25))
    assert one == same != other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchTrainer("train.py"), "must be a function"),  # type: ignore[arg-type]
        (lambda: TorchTrainer(print, metadata={}), r"no TorchTrainer\(metadata\): see docs/migrate.md#ray-train"),
        (lambda: ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}), "use_gpu is True, but .* has GPU=0"),
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
        with open_run(launcher, trainer, (), {}, only_try, logging.getLogger(__name__)) as handle:
            handle.wait()
        assert handle.directory == str(tmp_path / "of-the-step" / step)
        assert handle.status().state == "succeeded"
    assert not (tmp_path / "of-the-trainer").exists()


def in_rays_spelling() -> Any:
    shard = train.get_dataset_shard()
    [all_rows] = shard.iter_torch_batches(batch_size=None, dtypes=torch.float16)
    [typed] = shard.iter_torch_batches(batch_size=ROWS, dtypes={"x": torch.int8}, device="cpu", pin_memory=True)
    [made] = shard.iter_torch_batches(batch_size=ROWS, collate_fn=lambda arrays: arrays["x"].tolist())
    shuffled = shard.iter_torch_batches(batch_size=5, local_shuffle_buffer_size=ROWS, drop_last=True)
    epochs = [[batch["x"].tolist() for batch in shuffled] for _ in range(2)]
    with pytest.raises(InvalidJobError, match="no dataset 'test'.*has: train"):
        train.get_dataset_shard("test")
    return rt.all_gather_object((all_rows["x"].dtype, all_rows["name"], typed["x"].dtype, made, epochs))


def test_batches_of_a_table_in_rays_spelling(fit: FitsLoop, tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": list(range(2 * ROWS)), "name": [str(n) for n in range(2 * ROWS)]}), path)
    ours, theirs = fit(in_rays_spelling, datasets={"train": path}).return_value
    assert sorted(ours[3] + theirs[3]) == list(range(2 * ROWS)), "workers share the rows"
    kind, names, typed, made, epochs = ours
    assert (kind, typed, names) == (torch.float16, torch.int8, [str(row) for row in made]), "texts have no other type"
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[5] * 3] * 2
    assert epochs[0] != epochs[1], "each iteration is an epoch, with an order of its own"


class Shards(IterableDataset[int]):
    """Yields the rows of this worker's shards, as Ray's guides expect of a data set without indices."""

    def __iter__(self) -> Iterator[int]:
        context = train.get_context()
        return iter(range(context.get_world_rank(), 19, context.get_world_size()))


def test_loaders(fit: FitsLoop) -> None:
    def loop() -> Any:
        found = []
        plain: Any = DataLoader(range(19), 10, drop_last=True)  # type: ignore[arg-type]
        own: Any = DataLoader(range(1000), 8, sampler=WeightedRandomSampler(torch.ones(1000), 8))  # type: ignore[arg-type]
        torch.manual_seed(train.get_context().get_world_rank())
        for loader, is_shared in ((plain, True), (DataLoader(Shards(), 3), True), (own, False)):
            prepared = train.torch.prepare_data_loader(loader, add_dist_sampler=is_shared)
            found.append([int(row) for batch in prepared for row in batch])
        return rt.all_gather_object(found)

    (shared, shards, drawn), (shared_1, shards_1, drawn_1) = fit(loop).return_value
    # As torch's DistributedSampler pads 19 rows to 20; a batch that is not full is dropped.
    assert (shared, shared_1) == (list(range(0, 19, 2)), [*range(1, 19, 2), 0])
    assert (shards, shards_1) == (list(range(0, 19, 2)), list(range(1, 19, 2))), "it shares itself out"
    assert drawn != drawn_1, "without a distributed sampler each worker draws by itself"


NAMES = {
    "": "AcquiredResources BackendConfig BaseTrainer Checkpoint CheckpointConfig CheckpointConsistencyMode "
    "CheckpointUploadMode ControllerError DataBatchType DataConfig DataParallelTrainer DatasetConfig FailureConfig "
    "LoggingConfig NCCLHangError PreemptionError PreemptionInfo ReportedCheckpoint ReportedCheckpointStatus "
    "ResourceRequest Result RunConfig ScalingConfig SyncConfig TRAIN_DATASET_KEY TrainContext TrainingFailedError "
    "TrainingIterator UserCallback ValidationConfig ValidationFn ValidationTaskConfig WorkerGroupError air backend "
    "base_trainer collective data data_parallel_trainer get_all_reported_checkpoints get_checkpoint get_context "
    "get_dataset_shard get_preemption_info horovod init integrations jax lightgbm report runtime_env session shutdown "
    "tensorflow torch train tune v2 xgboost",
    ".torch": "TorchCheckpoint TorchConfig TorchDetectionPredictor TorchPredictor TorchTrainer accelerate backward "
    "enable_reproducibility get_device get_devices prepare_data_loader prepare_model prepare_optimizer",
}
"""Every public name of Ray Train 2.40 and 2.60, by their ``__all__`` and pages, and by the module here."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_a_name_of_ray_works_or_raises_the_error(module: str, name: str) -> None:
    line = f"from rankzero.compat.ray_train{module} import {name}"
    if name not in ABSENT:
        exec(line, {})
        return
    attribute = f"import rankzero.compat.ray_train{module or '.train'} as module; module.{name}"
    as_module = f"import rankzero.compat.ray_train.{name}", f"from rankzero.compat.ray_train.{name} import Anything"
    for refused in (line, attribute, *(() if module else as_module)):
        with pytest.raises(UnsupportedError, match=f"has no {name}: see docs/migrate.md#ray-train"):
            exec(refused, {})
