"""Checkpoints, results and restores of the Ray Train bridge behave as Ray's do."""

import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError, Launcher, ResultError, WorkerFailedError
from rankzero.compat.ray_train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TorchTrainer,
    TrainingFailedError,
    UserCallback,
    train,
)
from rankzero.run.retention import collect


def save(text: str, folder: str, name: str = "state") -> Checkpoint:
    Path(folder, name).write_text(text)
    return Checkpoint.from_directory(folder)


def scores(config: dict[str, Any]) -> Any:
    """Rank 0 alone reports a checkpoint for each score; every worker asks for it right behind."""
    seen = []
    for score in config["scores"]:
        with tempfile.TemporaryDirectory() as folder:
            is_first = train.get_context().get_world_rank() == 0
            train.report({"score": score}, checkpoint=save(str(score), folder) if is_first else None)
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        with checkpoint.as_directory() as found:
            seen.append(Path(found, "state").read_text())
        assert sorted(os.listdir(checkpoint.path)) == ["state"], "the path is a directory of the files in a worker, too"
    from rankzero.train import all_gather_object

    reported = [(each.metrics["score"], each.status.name) for each in train.get_all_reported_checkpoints()]
    return all_gather_object([seen, reported])


def fit(tmp_path: Path, loop: Any, config: dict[str, Any] | None = None, workers: int = 2, **run: Any) -> Result:
    run_config = RunConfig(**{"name": "run", "storage_path": tmp_path / "runs", **run})
    return TorchTrainer(
        loop, train_loop_config=config or {}, scaling_config=ScalingConfig(num_workers=workers), run_config=run_config,
        # With time for the write of what was reported right before a failure.
        launcher=Launcher(stop_grace=60),
    ).fit()  # fmt: skip


def test_a_worker_gets_the_checkpoint_that_was_just_reported(tmp_path: Path) -> None:
    result = fit(tmp_path, scores, {"scores": [3.0, 1.0, 2.0]})
    of_each = [["3.0", "1.0", "2.0"], [(3.0, "COMMITTED"), (1.0, "COMMITTED"), (2.0, "COMMITTED")]]
    assert result.return_value == [of_each, of_each]
    assert result.metrics == {"score": 2.0}


@pytest.mark.parametrize(
    ("order", "expected"),
    [("max", [2.0, 3.0]), pytest.param("min", [2.0, 1.0], marks=pytest.mark.soak), (None, [1.0, 2.0])],
)
def test_the_best_checkpoint_is_the_last_one(tmp_path: Path, order: str | None, expected: list[float]) -> None:
    config = CheckpointConfig(2, "score", order) if order else CheckpointConfig(2)
    result = fit(tmp_path, scores, {"scores": [3.0, 1.0, 2.0]}, workers=1, checkpoint_config=config)
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == expected
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "state").read_text() == "2.0", "the newest"


def test_a_result_and_its_checkpoints_are_pickled(tmp_path: Path) -> None:
    result = pickle.loads(pickle.dumps(fit(tmp_path, scores, {"scores": [1.0]}, workers=1)))
    assert result.metrics == {"score": 1.0}
    [(checkpoint, _)] = result.best_checkpoints
    assert checkpoint.path == result.checkpoint.path == pickle.loads(pickle.dumps(checkpoint)).path
    assert os.listdir(checkpoint.path) == ["state"]
    assert str(tmp_path / "runs" / "run") in checkpoint.path, "in the run directory, and deleted with the checkpoint"
    assert Path(checkpoint.to_directory(tmp_path / "copy"), "state").read_text() == "1.0"


def test_a_deleted_checkpoint_is_gone_with_its_unpacked_files(tmp_path: Path) -> None:
    def run() -> Result:
        return fit(tmp_path, scores, {"scores": [1.0]}, workers=1, checkpoint_config=CheckpointConfig(1))

    checkpoint = run().checkpoint
    assert checkpoint is not None
    path = checkpoint.path
    run()
    assert not os.path.exists(path)
    for opened in (lambda: checkpoint.path, checkpoint.to_directory):
        with pytest.raises(ResultError, match="was deleted, since it is not kept"):
            opened()
    [removed] = collect(tmp_path / "runs", 1.0, now=time.time() + 1e6).removed
    assert removed.directory == str(tmp_path / "runs" / "run")
    assert not os.path.exists(removed.directory)


def test_a_worker_returns_a_checkpoint_that_its_caller_opens(tmp_path: Path) -> None:
    def loop() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            train.report({}, checkpoint=save("returned", folder))
        return train.get_checkpoint()

    with fit(tmp_path, loop, workers=1).return_value.as_directory() as found:
        assert Path(found, "state").read_text() == "returned"


def test_metadata_are_a_file_of_the_checkpoint(tmp_path: Path) -> None:
    def loop() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = save("", folder)
            assert checkpoint.get_metadata() == {}
            checkpoint.set_metadata({"epoch": 1, "kept": True})
            checkpoint.update_metadata({"epoch": 2})
            train.report({}, checkpoint=checkpoint)
        reported = train.get_checkpoint()
        return reported and reported.get_metadata()

    result = fit(tmp_path, loop, workers=1)
    assert result.checkpoint is not None
    assert result.return_value == result.checkpoint.get_metadata() == {"epoch": 2, "kept": True}
    result.checkpoint.update_metadata({"validated": "later"})
    again = Result.from_path(result.path).checkpoint
    assert again is not None
    with again.as_directory() as folder:
        assert Checkpoint(folder).get_metadata() == {"epoch": 2, "kept": True, "validated": "later"}


@pytest.mark.parametrize("kind", ["pyarrow", "fsspec", "url"])
def test_a_checkpoint_on_a_filesystem(tmp_path: Path, kind: str) -> None:
    import fsspec
    from pyarrow import fs

    memory = fsspec.filesystem("memory")
    memory.pipe(f"/{kind}/state", b"remote")
    if kind == "url":
        checkpoint = Checkpoint(f"memory://{kind}")
    else:
        checkpoint = Checkpoint(f"/{kind}", fs.PyFileSystem(fs.FSSpecHandler(memory)) if kind == "pyarrow" else memory)
    with checkpoint.as_directory() as folder:
        assert Path(folder, "state").read_bytes() == b"remote"
    assert checkpoint.filesystem.get_file_info(f"{checkpoint.path}/state").size == 6
    checkpoint.set_metadata({"epoch": 3})
    assert checkpoint.get_metadata() == {"epoch": 3}
    local = Checkpoint(str(tmp_path), fs.LocalFileSystem())
    assert (local.path, local.filesystem.type_name) == (str(tmp_path), "local")


def test_an_upload_function_and_a_local_directory_that_is_deleted(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            target = os.path.join(config["target"], name)
            os.rename(checkpoint.path, target)
            return Checkpoint.from_directory(target)

        folder = tempfile.mkdtemp()
        train.report({}, checkpoint=save("uploaded", folder), checkpoint_dir_name="one", checkpoint_upload_fn=upload)
        other = tempfile.mkdtemp()
        train.report({}, checkpoint=save("async", other), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        return os.path.exists(other)

    (tmp_path / "target").mkdir()
    result = fit(tmp_path, loop, {"target": str(tmp_path / "target")}, workers=1)
    assert result.return_value is False
    found = [Path(checkpoint.path, "state").read_text() for checkpoint, _ in result.best_checkpoints]
    assert found == ["uploaded", "async"]
    assert (tmp_path / "target" / "one" / "state").exists()


def in_one_directory(config: dict[str, Any]) -> Any:
    """All workers report one directory, to which the last one adds a file after the others have listed it."""
    for number in range(2):
        if number == train.get_context().get_world_rank() == 1:
            time.sleep(0.5)
            Path(config["shared"], "of-another").touch()
        train.report({}, checkpoint=save(str(number), config["shared"]))
        train.collective.barrier()
    return train.get_checkpoint()


def test_workers_may_report_one_directory_whose_files_change(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    checkpoint = fit(tmp_path, in_one_directory, {"shared": str(tmp_path / "shared")}).return_value
    assert Path(checkpoint.path, "state").read_text() == "1"


def test_a_validation_of_a_checkpoint_is_refused_with_advice(tmp_path: Path) -> None:
    def loop() -> None:
        train.report({}, validation=True)

    with pytest.raises(TrainingFailedError, match="validate in the training function, or in a step of the pipeline"):
        fit(tmp_path, loop, workers=1)


def test_a_run_starts_from_a_given_checkpoint(tmp_path: Path) -> None:
    def loop() -> str:
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        with checkpoint.as_directory() as folder:
            return Path(folder, "state").read_text()

    (tmp_path / "first").mkdir()
    given = save("given", str(tmp_path / "first"))
    run = RunConfig(storage_path=tmp_path / "runs")
    assert TorchTrainer(loop, resume_from_checkpoint=given, run_config=run).fit().return_value == "given"


def failing_once(config: dict[str, Any]) -> Any:
    first = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "state").read_text()) + 1
    for epoch in range(first, config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            train.report({"epoch": epoch}, checkpoint=save(str(epoch), folder))
        if epoch == config.get("fails_at"):
            raise RuntimeError("out of luck")
    return first, config["name"]


def test_a_failed_run_is_restored_from_its_directory(tmp_path: Path) -> None:
    config = {"epochs": 4, "fails_at": 1, "name": "of the run"}
    assert not TorchTrainer.can_restore(tmp_path / "runs" / "run")
    with pytest.raises(TrainingFailedError):
        fit(tmp_path, failing_once, config, failure_config=FailureConfig(max_failures=0))
    path = tmp_path / "runs" / "run"
    assert TorchTrainer.can_restore(path)
    trainer = TorchTrainer.restore(path, train_loop_config={**config, "name": "another"})
    assert trainer.scaling_config.num_workers == 2
    result = trainer.fit()
    assert (result.return_value, result.path) == ((2, "another"), str(path))
    again = TorchTrainer.restore(f"{path}/", scaling_config=ScalingConfig(num_workers=1))
    assert again.fit().return_value == (4, "another"), "its own function and configuration"


def test_only_the_run_of_a_trainer_is_restored(tmp_path: Path) -> None:
    Launcher(1, store=tmp_path, run_id="other").run(os.getpid)
    with pytest.raises(InvalidJobError, match="was not made by a TorchTrainer"):
        TorchTrainer.restore(tmp_path / "other")


def test_errors_are_rays(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError) as caught:
        fit(tmp_path, failing_once, {"epochs": 1, "fails_at": 0, "name": ""}, workers=1)
    [failure] = vars(caught.value)["worker_failures"].values()
    assert isinstance(failure, WorkerFailedError)
    assert "out of luck" in str(failure)
    error = Result.from_path(tmp_path / "runs" / "run").error
    assert list(vars(error)["worker_failures"]) == [0]
    with pytest.raises(RuntimeError, match="no run lives in"):
        Result.from_path(tmp_path / "nowhere")


def test_a_metric_that_nobody_reported_has_no_best_checkpoint(tmp_path: Path) -> None:
    result = fit(tmp_path, scores, {"scores": [1.0]}, workers=1)
    with pytest.raises(RuntimeError, match="Invalid metric name 'loss': the reports with checkpoints have score"):
        result.get_best_checkpoint("loss", "min")
    with pytest.raises(ValueError, match="mode is 'best'"):
        result.get_best_checkpoint("score", "best")
    assert result.filesystem.type_name == "local"
    from pyarrow import fs

    again = Result.from_path(f"{result.path}/", storage_filesystem=fs.LocalFileSystem())
    assert again.metrics == result.metrics
    with pytest.raises(TypeError, match="give path as an fsspec URL"):
        Result.from_path("runs/run", storage_filesystem=fs.SubTreeFileSystem("/tmp", fs.LocalFileSystem()))
    assert repr(Checkpoint("/bucket/one")) == "Checkpoint(filesystem=local, path=/bucket/one)"


class Noting(UserCallback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        state = Path(checkpoint.path, "state").read_text() if checkpoint else None
        self.note(f"{run_context.run_id} {metrics} {state}")

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.note(f"{worker_exceptions}")


def reporting(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    train.report({"rank": rank})
    with tempfile.TemporaryDirectory() as folder:
        train.report({"rank": rank, "saved": 1}, checkpoint=save("here", folder) if rank == 0 else None)
    if rank == 1:
        raise ValueError("out of luck")


def test_callbacks_get_the_metrics_of_all_workers_and_exceptions(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match="out of luck"):
        fit(tmp_path, reporting, callbacks=[Noting(tmp_path / "notes")])
    assert set((tmp_path / "notes").read_text().splitlines()) == {
        "run [{'rank': 0}, {'rank': 1}] None",
        "run [{'rank': 0, 'saved': 1}, {'rank': 1, 'saved': 1}] here",
        "{1: ValueError('out of luck')}",
    }
    with pytest.raises(InvalidJobError, match="give objects of subclasses of UserCallback"):
        RunConfig(callbacks=["a logger"])


def test_the_environment_names_the_device_and_the_node(tmp_path: Path) -> None:
    def loop() -> Any:
        names = ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU", "NODE_RANK")
        return [os.environ[name] for name in names], train.get_preemption_info()

    assert fit(tmp_path, loop, workers=1).return_value == (["cpu", "true", "0"], None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_workers": 2}, {"CPU": 2.0}),
        ({"num_workers": 2, "use_gpu": True}, {"GPU": 2.0}),
        ({"num_workers": 3, "use_gpu": True, "resources_per_worker": {"CPU": 2}}, {"CPU": 6.0, "GPU": 3.0}),
        ({"num_workers": (1, 4)}, {"CPU": 4.0}),
    ],
)
def test_resources_are_counted_as_ray_does(options: dict[str, Any], expected: dict[str, float]) -> None:
    scaling = ScalingConfig(**options)
    assert scaling.total_resources == expected
    assert (scaling.num_cpus_per_worker, scaling.num_gpus_per_worker) == tuple(
        expected.get(name, 0) / scaling.max_workers for name in ("CPU", "GPU")
    )


def test_fields_of_the_newest_ray_are_accepted() -> None:
    failures = FailureConfig(
        2, relax_collectives_on_preemption=True, preemption_grace_s=5.0, controller_failure_limit=0
    )
    trainer = TorchTrainer(
        failing_once,
        run_config=RunConfig(failure_config=failures),
        scaling_config=ScalingConfig((1, 2), elastic_resize_monitor_interval_s=1.0),
    )
    assert trainer.launch_options()["max_restarts"] == 2
    with pytest.raises(InvalidJobError, match="label_selector is not supported: choose the executors"):
        ScalingConfig(label_selector={"zone": "a"})
