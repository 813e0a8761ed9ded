"""The decorator of Databricks' AI runtime."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rankzero import EngineError, InvalidJobError, Launcher, LocalEngine, SparkEngine, WorkerFailedError
from rankzero.compat import databricks
from rankzero.compat.databricks import GPUType, distributed, runtime


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_STORE", str(tmp_path / "runs"))


@distributed(gpus=2, gpu_type=GPUType.H100, use_gpu=False)
def ranks(offset: int = 0) -> tuple[int, ...]:
    of = runtime.get_local_rank(), runtime.get_local_world_size(), runtime.get_node_rank(), runtime.get_world_size()
    return runtime.get_global_rank() + offset, *of


def test_distributed_returns_the_values_of_all_ranks() -> None:
    assert ranks.distributed(offset=10) == [(10, 0, 2, 0, 2), (11, 1, 2, 0, 2)]
    assert ranks() == (0, 0, 1, 0, 1), "a plain call"
    assert Launcher(1).run(ranks) == (0, 0, 1, 0, 1)
    with pytest.raises(InvalidJobError, match=r"the arguments do not fit ranks\(offset"):
        ranks.distributed(1, 2)


def test_the_guide_s_function_may_destroy_its_process_group() -> None:
    @distributed(num_accelerators=2, use_gpu=False)
    def train() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item() + runtime.get_global_rank()

    assert train.distributed() == [2.0, 3.0]


def test_a_rank_that_fails_is_an_error() -> None:
    @distributed(gpus=2, use_gpu=False)
    def train() -> None:
        if runtime.get_global_rank() == 1:
            raise ValueError("no data")

    with pytest.raises(WorkerFailedError, match="rank 1 .* failed: ValueError: no data"):
        train.distributed()


def test_a_wrong_use_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidJobError, match=r"write @distributed\(\)"):
        distributed(lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidJobError, match="two names of one argument"):
        distributed(gpus=2, num_accelerators=2)
    with pytest.raises(EngineError, match="there is none"):
        distributed(gpus=2, remote=True)
    with pytest.raises(InvalidJobError, match="decorates a function, not 3"):
        distributed(gpus=1)(3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"has no ray_launch: .*rankzero.compat.ray_train"):
        databricks.ray_launch  # noqa: B018
    with caplog.at_level(logging.INFO, "rankzero"):
        assert distributed(gpus=2, gpu_type="A10", remote=True, engine=LocalEngine())
    assert "gpu_type='A10' has no effect" in caplog.text


def test_remote_is_the_cluster_of_the_active_session(session: Any) -> None:
    @distributed(gpus=2, remote=True, use_gpu=False)
    def rank() -> int:
        return runtime.get_global_rank()

    assert rank.launcher.engine == SparkEngine(session=session)
    assert rank.distributed() == [0, 1]
