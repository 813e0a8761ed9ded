"""Checkpoints of which each worker writes a part, as Lightning's strategies do, on hosts that share no file system."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import rankzero.train as rt
from rankzero.compat.ray_train import RunConfig, ScalingConfig, TorchTrainer, train

CLONE_NEWNS = 0x00020000


def install_frameworks() -> None:
    """Installs modules with the names of Lightning's and of Hugging Face's that the door subclasses."""
    import sys
    from types import ModuleType, SimpleNamespace

    for name in ("pytorch", "pytorch.strategies", "pytorch.plugins.environments"):
        module = sys.modules[f"lightning.{name}"] = ModuleType(f"lightning.{name}")
        for each in ("Callback", "DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "LightningEnvironment"):
            setattr(module, each, type(each, (), {}))
    transformers: Any = ModuleType("transformers")
    transformers.TrainerCallback, transformers.trainer_utils = object, SimpleNamespace(PREFIX_CHECKPOINT_DIR="at")
    sys.modules["transformers"] = transformers


class Trainer:
    """Saves as DeepSpeed's and FSDP's strategies do: each worker writes its part below the path of rank 0."""

    callback_metrics: dict[str, Any] = {}
    current_epoch = global_step = 1

    def save_checkpoint(self, path: str, weights_only: bool) -> None:
        path = rt.broadcast_object(path)
        os.makedirs(path, exist_ok=True)
        Path(path, f"part-{rt.get_context().rank}").touch()
        rt.barrier()


def loop(config: dict[str, Any]) -> list[Any]:
    """Returns the names that each worker reports and leaves.

    Each odd worker is on a host of its own, whose file system has another directory in the place of the root.
    """
    rank, root = rt.get_context().rank, config["root"]
    if rank % 2:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    tempfile.tempdir = f"{root}/of-{rank}"
    os.mkdir(tempfile.tempdir)
    install_frameworks()
    from types import SimpleNamespace

    from rankzero.compat.ray_train.huggingface import transformers

    report, given = train.report, list[list[str]]()

    def reported(metrics: Any, checkpoint: Any, **options: Any) -> None:
        given.append(sorted(path.name for path in Path(checkpoint.path).rglob("part-*")))
        report(metrics, checkpoint, **options)

    train.report = reported
    (saved := Path(root, "at-1")).mkdir(exist_ok=True)
    (saved / f"part-{rank}").touch()
    transformers.RayTrainReportCallback().on_save(
        SimpleNamespace(output_dir=root), SimpleNamespace(log_history=[], global_step=1), None
    )
    shutil.rmtree(saved, ignore_errors=True)
    for _ in range(2):
        train.lightning.RayTrainReportCallback().on_train_epoch_end(Trainer(), None)
    rt.barrier()
    left = sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))
    return rt.all_gather_object((given, left))


def test_a_checkpoint_has_the_parts_of_all_hosts(tmp_path: Path, session: Any) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs the right to mount")
    (root := tmp_path / "local").mkdir()
    trainer = TorchTrainer(
        loop,
        train_loop_config={"root": str(root)},
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(storage_path=tmp_path / "runs"),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    saved = Path(result.checkpoint.path, "checkpoint.ckpt")
    assert sorted(os.listdir(saved)) == ["part-0", "part-1", "part-2", "part-3"]
    given, left = zip(*result.return_value, strict=True)
    assert left == (["of-0", "of-2"], ["of-1"], ["of-0", "of-2"], ["of-3"]), "no files are left"
    for of_callback in zip(*given, strict=True):
        assert sorted(of_callback) == [[], ["part-0", "part-2"], ["part-1"], ["part-3"]], "each host reports once"
