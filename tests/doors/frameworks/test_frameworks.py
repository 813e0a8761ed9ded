"""Training functions and scripts of other frameworks, as their users write them: `make test-frameworks` installs them.

Models are tiny and made at random; nothing is downloaded.
"""

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find
from tests.docs.pages import blocks

from rankzero import InvalidJobError, Launcher, WorkerFailedError
from rankzero.compat.deepspeed_distributor import DeepspeedTorchDistributor


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; make test-frameworks")


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(2, store=tmp_path / "runs", env={"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)})


def lightning_fit(**options: Any) -> Any:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any) -> Any:
            [x] = batch
            loss = self.layer(x).pow(2).mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader)
    return trainer.world_size, trainer.num_training_batches, {k: v.cpu() for k, v in module.state_dict().items()}


@needs("lightning")
def test_lightning(launcher: Launcher) -> None:
    def train() -> Any:
        import rankzero.train as rt

        context = rt.get_context()
        return lightning_fit(devices=context.local_world_size, num_nodes=context.num_nodes)

    world_size, batches, state = launcher.run(train)
    assert (world_size, batches) == (2, 4)
    assert list(state) == ["layer.weight", "layer.bias"]


@needs("lightning")
def test_a_rank_that_works_alone_after_lightnings_fit_succeeds(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer restores all handlers of signals, without those of faulthandler, which write a rank's stack."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")

    def train() -> str | None:
        import time

        import rankzero.train as rt

        context = rt.get_context()
        lightning_fit(devices=context.local_world_size, num_nodes=context.num_nodes)
        if context.rank:
            return None
        time.sleep(8.0)
        return "exported"

    assert launcher.options(run_id="alone").run(train) == "exported"
    handle = find(launcher.options(run_id="alone"))
    assert handle is not None
    assert any("rank 1 returned, without other progress" in line for line in handle.logs(rank=0))


@needs("lightning")
@pytest.mark.parametrize("options", [{"devices": "auto"}, {"devices": 2, "num_nodes": 2}])
def test_a_wrong_world_of_lightnings_is_named(launcher: Launcher, options: dict[str, Any]) -> None:
    def train() -> Any:
        return lightning_fit(**options)

    with pytest.raises(WorkerFailedError, match="does not match the world size"):
        launcher.run(train)


@needs("transformers", "accelerate")
def test_arguments_that_know_another_world_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(InvalidJobError, match=r"argument 'x' \(a TrainingArguments\) cannot be pickled.*inside of the"):
        launcher.run(lambda x: x, arguments)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(InvalidJobError, match="holds accelerate's .*make TrainingArguments or Accelerator inside"):
        launcher.run(lambda: accelerator.num_processes)


def accelerate_fit(lr: float, found: list[Any] | None = None) -> Any:
    """What a notebook gives to notebook_launcher; its world goes into ``found``, since that returns nothing."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    rows = torch.arange(64.0).reshape(16, 4) / 64
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for [x] in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    world = [accelerator.num_processes, len(loader)]
    if found is not None:
        found += world
    return world, accelerator.unwrap_model(model).weight.detach()


@needs("accelerate")
def test_the_function_of_a_notebook_launcher_and_the_call_of_it_in_a_rank(launcher: Launcher) -> None:
    def cell(processes: int) -> Any:
        from accelerate import notebook_launcher

        found: list[Any] = []
        notebook_launcher(accelerate_fit, (0.1, found), num_processes=processes)
        return found

    world, weight = launcher.run(accelerate_fit, 0.1)
    assert world == [2, 4]
    assert launcher.run(cell, 1) == [2, 4], "it calls the function, which finds the rank's world"
    alone, other = launcher.options(num_processes=1).run(accelerate_fit, 0.1)
    assert alone == [1, 8]
    assert not weight.equal(other), "each rank had half of the rows"


@needs("torchdata")
def test_a_stateful_loader_of_torchdata_goes_on(launcher: Launcher) -> None:
    def train() -> Any:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        import rankzero.train as rt

        def loader() -> Any:
            data = torch.utils.data.TensorDataset(torch.arange(12))
            return rt.prepare_data_loader(StatefulDataLoader(data, batch_size=2, shuffle=True, num_workers=1))

        first, again = loader(), loader()
        batches = iter(first)
        seen = [int(row) for _ in range(2) for row in next(batches)[0]]
        again.load_state_dict(first.state_dict())
        rest = [int(row) for [batch] in again for row in batch]
        return rt.all_gather_object(seen + rest)

    shares = launcher.run(train)
    assert sorted(shares[0] + shares[1]) == list(range(12))


DEEPSPEED = """
    import argparse, os
    import deepspeed, torch
    import rankzero.train as rt

    # Its kernel for shared memory would be compiled for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--lr", type=float)
    parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 4)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rt.set_result([type(engine).__name__, type(optimizer).__name__, engine.world_size, args.lr, losses])
"""


@needs("deepspeed")
def test_deepspeed_trains_with_its_own_engine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(DEEPSPEED))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    distributor = DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig=config)
    engine, optimizer, world_size, lr, losses = distributor.run(str(tmp_path / "train.py"), "--lr=0.5")
    assert (engine, optimizer, world_size, lr) == ("DeepSpeedEngine", "DeepSpeedZeroOptimizer", 2, 0.5)
    assert losses[-1] < losses[0]


@needs("optuna")
def test_the_documentations_study_finds_a_good_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path))
    found, study = [block for block in blocks("docs/python.md") if "sweep_step" in block.text]
    names: dict[str, Any] = {"__name__": "sweeps"}
    for block in (found, study):
        exec(compile(block.text, block.page, "exec", dont_inherit=True), names)
    assert len(names["study"].trials) == 12
    assert abs(names["study"].best_params["lr"] - 0.3) < 0.3
