"""Tensor and sequence parallelism, and FSDP2 beside it, as torch's guides have them: the ranks train as one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankzero import Launcher

SPLIT = ("up.weight", "up.bias", "down.weight")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def build(seed: int) -> Mlp:
    torch.manual_seed(seed)
    return Mlp()


def rows() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(5))


def trained(model: Any, mine: torch.Tensor, scale: float = 1.0) -> Any:
    """The model after two steps over some rows, whose loss is a sum."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        (model(mine).pow(2).sum() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_ranks_that_share_layers_train_as_one_process_would(tmp_path: Path) -> None:
    def train() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        import rankzero.train as rt

        context = rt.get_context()
        # It makes the process group, too.
        mesh = init_device_mesh(context.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
        replica, part = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank()
        tensor = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        sequence = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
        models = {
            "tensor": trained(parallelize_module(build(0), mesh["tensor"], tensor), rows()),
            "sequence": trained(parallelize_module(build(0), mesh["tensor"], sequence), rows().chunk(2)[part]),
        }
        # Replicas have other weights here: those of the first count, part by part.
        both = parallelize_module(build(replica), mesh["tensor"], tensor)
        with pytest.raises(ValueError, match="tensor-parallel: give strategy='fsdp' and mesh="):
            rt.prepare_model(both)
        both = rt.prepare_model(both, "fsdp", mesh=mesh["data"])
        # FSDP takes the mean of the replicas' gradients.
        models["fsdp and tensor"] = trained(both, rows().chunk(2)[replica], scale=2.0)
        return {
            kind: ([model.get_parameter(name).to_local().numel() for name in SPLIT], rt.full_state_dict(model))
            for kind, model in models.items()
        }

    found = Launcher(4, store=tmp_path).run(train)
    alone = trained(build(0), rows()).state_dict()
    for kind, (numbers, weights) in found.items():
        parts = 4 if kind == "fsdp and tensor" else 2
        assert numbers == [alone[name].numel() // parts for name in SPLIT], f"{kind}: a part of each on this rank"
        assert list(weights) == list(alone)
        for name, expected in alone.items():
            torch.testing.assert_close(weights[name], expected, msg=f"{kind}, {name}")
