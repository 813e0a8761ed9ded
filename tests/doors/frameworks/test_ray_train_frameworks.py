"""Ray Train's "getting started" pages for Lightning and Transformers, with changed imports: `make test-frameworks`.

Models are tiny and made at random; nothing is downloaded.
"""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.doors.frameworks.test_frameworks import needs

from rankzero import Launcher, SparkEngine
from rankzero.compat.ray_train import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TorchTrainer,
    TrainingFailedError,
    train,
)


@pytest.fixture(params=["here", "spark"])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Launcher:
    engine = SparkEngine(master="local[2]") if request.param == "spark" else None
    return Launcher(engine=engine, env={"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)})


def lightning_loop(config: dict[str, Any]) -> Any:
    import pytorch_lightning as pl
    import torch

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(8, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            self.log("loss", loss, on_step=True, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    lightning: Any = train.lightning  # type: ignore[attr-defined]

    class Fails(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == config.get("fails_at") and train.get_checkpoint() is not None:
                raise RuntimeError("to be restored")

    trainer = pl.Trainer(
        max_epochs=3, devices="auto", accelerator="cpu", logger=False, enable_progress_bar=False,
        strategy=lightning.RayDDPStrategy(), plugins=[lightning.RayLightningEnvironment()],
        callbacks=[lightning.RayTrainReportCallback(), Fails()], enable_checkpointing=False,
    )  # fmt: skip
    trainer = lightning.prepare_trainer(trainer)
    first = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            path = os.path.join(folder, lightning.RayTrainReportCallback.CHECKPOINT_NAME)
            first = torch.load(path, weights_only=False)["epoch"] + 1
            config.pop("fails_at", None)
            trainer.fit(Classifier(), train_dataloaders=loader, ckpt_path=path)
    else:
        trainer.fit(Classifier(), train_dataloaders=loader)
    return trainer.world_size, trainer.num_training_batches, first


@needs("lightning", "pytorch_lightning")
def test_lightning_reports_and_resumes(launcher: Launcher, tmp_path: Path) -> None:
    import torch

    trainer = TorchTrainer(
        lightning_loop,
        train_loop_config={"fails_at": 2},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path / "runs", failure_config=FailureConfig(max_failures=1)),
        launcher=launcher,
    )
    result = trainer.fit()
    assert result.return_value == (2, 4, 2), "two workers share 8 batches, and resume behind the second epoch"
    assert result.metrics is not None
    assert set(result.metrics) >= {"loss", "epoch", "step"}
    assert (result.metrics["epoch"], result.metrics["step"]) == (2, 12)
    assert result.checkpoint is not None
    state = torch.load(Path(result.checkpoint.path, "checkpoint.ckpt"), weights_only=False)
    assert state["state_dict"]["model.weight"].shape == (3, 8)


@needs("lightning")
def test_a_trainer_of_lightning_that_would_train_alone_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    def loop() -> None:
        import lightning

        train.lightning.prepare_trainer(lightning.Trainer(accelerator="cpu", devices=1, logger=False))  # type: ignore[attr-defined]

    with pytest.raises(
        TrainingFailedError, match=r"the trainer has a SingleDeviceStrategy; give it strategy=RayDDPStrategy\(\)"
    ):
        TorchTrainer(loop, run_config=RunConfig(storage_path=tmp_path / "runs"), launcher=launcher).fit()


def transformers_loop(config: dict[str, Any]) -> Any:
    import numpy as np
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    # The page's `ray.train.huggingface.transformers`, by attributes.
    of_ray: Any = train.huggingface.transformers  # type: ignore[attr-defined]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=5, **sizes))

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.arange(6) + index % 8, "labels": torch.tensor(index % 5)}

    data: Any = Rows()
    held_out: Any = data
    if config["shards"]:
        data, held_out = (train.get_dataset_shard(name).iter_torch_batches(batch_size=4) for name in ("train", "test"))

    def compute_metrics(predicted: Any) -> dict[str, float]:
        logits, labels = predicted
        return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}

    arguments = TrainingArguments(
        output_dir=config["output"], eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch",
        report_to="none", per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, num_train_epochs=2,
        **({"max_steps": 8} if config["shards"] else {}),
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=held_out, compute_metrics=compute_metrics
    )
    trainer.add_callback(of_ray.RayTrainReportCallback())
    trainer = of_ray.prepare_trainer(trainer)
    trainer.train()
    return trainer.args.world_size, trainer.state.global_step


@needs("transformers", "accelerate")
@pytest.mark.parametrize("shards", [False, True], ids=["data set", "shards of the trainer"])
def test_transformers_reports_checkpoints(launcher: Launcher, tmp_path: Path, shards: bool) -> None:
    ids = pa.array([[row % 8 + place for place in range(6)] for row in range(32)], pa.list_(pa.int64(), 6))
    pq.write_table(pa.table({"input_ids": ids, "labels": [row % 5 for row in range(32)]}), tmp_path / "rows.parquet")
    rows = str(tmp_path / "rows.parquet")
    trainer = TorchTrainer(
        transformers_loop,
        train_loop_config={"output": str(tmp_path / "output"), "shards": shards},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=tmp_path / "runs",
            checkpoint_config=CheckpointConfig(3, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"),
        ),
        datasets={"train": rows, "test": rows} if shards else None,
        launcher=launcher,
    )
    result = trainer.fit()
    assert result.return_value == (2, 8)
    assert result.metrics is not None
    assert {"eval_loss", "eval_accuracy", "loss", "epoch"} <= set(result.metrics)
    assert len(result.best_checkpoints) == 2
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert {"model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= set(
            os.listdir(Path(folder, "checkpoint"))
        )
    assert [path.name for path in (tmp_path / "output").iterdir() if "run" in path.name] == []
