"""`hvd` on torch.distributed beside torch itself: a 4-byte allreduce, and steps of a model of 10 M parameters.

The sides take turns in the same two ranks.

    python benchmarks/horovod.py [launches]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict

from measure import Report
from turns import Turns, ratios, take_turns

from rankzero import Launcher

RANKS = 2
LAUNCHES = int(sys.argv[1]) if sys.argv[1:] else 5


def latency() -> Turns:
    """Seconds of an allreduce of 4 bytes."""
    import torch
    import torch.distributed as dist

    import rankzero.compat.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    value = torch.ones(1)
    sides = {
        "torch.distributed.all_reduce": lambda: dist.all_reduce(value),
        "hvd.allreduce": lambda: hvd.allreduce(value, name="value"),
        "hvd.allreduce without a name": lambda: hvd.allreduce(value),
        "hvd.allreduce_": lambda: hvd.allreduce_(value, name="in place"),
    }
    return take_turns(sides, turns=20, steps=100)


def steps() -> Turns:
    """Seconds of a training step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import rankzero.compat.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    x, y = torch.randn(32, 1024), torch.randint(0, 10, (32,))

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(9):
            layers += [torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
        assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6
        return model

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    parallel = DistributedDataParallel(build())
    plain = torch.optim.SGD(parallel.parameters(), lr=0.01)
    ours = build()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.01), ours.named_parameters())
    sides = {
        "DistributedDataParallel": lambda: step(parallel, plain),
        "DistributedOptimizer": lambda: step(ours, wrapped),
    }
    return take_turns(sides, turns=8, steps=4)


def main() -> None:
    report = Report("horovod", f"hvd and torch.distributed, {RANKS} ranks")
    calls: Turns = defaultdict(list)
    trained: Turns = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(RANKS, store=store)
        for _ in range(LAUNCHES):
            for all_of_them, found in ((calls, launcher.run(latency)), (trained, launcher.run(steps))):
                for name, seconds in found.items():
                    all_of_them[name] += seconds
    torch_call, *hvd_calls = calls
    for name, seconds in calls.items():
        report.add(f"4 bytes, {name}", [1e6 * value for value in seconds], "us")
    for name in hvd_calls:
        found = ratios(calls, name, torch_call)
        report.hold(f"4 bytes, {name} / {torch_call}", statistics.median(found), 2.5)
    for name, seconds in trained.items():
        report.add(f"10 M parameters, {name}", [1 / value for value in seconds], "steps/s")
    found = ratios(trained, "DistributedDataParallel", "DistributedOptimizer")
    report.add("10 M parameters, steps/s of hvd / DDP", found, "x")
    report.hold("10 M parameters, steps/s of hvd / DDP", statistics.median(found), 0.95, at_least=True)
    report.finish()


if __name__ == "__main__":
    main()
