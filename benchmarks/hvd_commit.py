"""What ``state.commit()`` of an elastic training costs beside ``torch.save`` of the same state: 10 M parameters, Adam.

The sides take turns in the same two ranks. Commits come one right after the other: each waits for the last one's file.

    python benchmarks/hvd_commit.py
"""

from __future__ import annotations

import statistics
import tempfile

from measure import Report
from turns import Turns, ratios, take_turns

from rankzero import Launcher


def commits(directory: str) -> Turns:
    """Seconds of one."""
    import torch

    import rankzero.compat.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(10)))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    model(torch.ones(8, 1000)).sum().backward()
    optimizer.step()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    def save() -> None:
        if hvd.rank() == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], f"{directory}/saved.pt")
        hvd.barrier()

    def commit() -> None:
        state.commit()
        hvd.barrier()

    return take_turns({"torch.save": save, "commit": commit}, turns=6, steps=3)


def main() -> None:
    report = Report("hvd_commit", "a commit of an elastic state, 2 ranks")
    with tempfile.TemporaryDirectory() as directory:
        turns = Launcher(2, store=f"{directory}/runs").run(commits, directory)
    for side, seconds in turns.items():
        report.add(side, seconds)
    report.hold("commit / torch.save", statistics.median(ratios(turns, "commit", "torch.save")), 3.0)
    report.finish()


if __name__ == "__main__":
    main()
