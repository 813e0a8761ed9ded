"""What supervision costs a training: steps per second under rankzero, beside the same ranks started bare.

Under rankzero there are heartbeats, a line of output and a report every ten steps; bare there is nothing but two
processes with torchrun's variables, which print to a file. Pairs are run in turn, since machines drift.

    python benchmarks/steps.py [pairs] [seconds]
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rankzero import Launcher

RANKS = 2


def train(seconds: float, supervised: bool) -> float:
    """Steps per second of a small DDP model."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    data, labels = torch.randn(256, 256), torch.randint(0, 10, (256,))
    steps, started = 0, 0.0
    while True:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(parallel(data), labels)
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 20:
            started = time.perf_counter()
        if steps % 10 == 0:
            print(f"step {steps} loss {loss.item():.4f}", flush=True)
            if supervised:
                import rankzero.train as rt

                rt.report({"loss": loss.item(), "step": steps})
            done = torch.tensor([float(steps > 20 and time.perf_counter() - started > seconds)])
            dist.broadcast(done, 0)
            if done.item():
                return (steps - 20) / (time.perf_counter() - started)


def bare(seconds: float) -> float:
    """The same ranks as plain processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(RANKS):
            env = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            log = open(Path(directory) / f"{rank}.log", "wb")
            ranks.append(subprocess.Popen([sys.executable, __file__, "--rank", str(seconds)], env=env, stdout=log))
        codes = [process.wait() for process in ranks]
        assert codes == [0] * RANKS, codes
        return float((Path(directory) / "0.log").read_text().splitlines()[-1].split()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        print("rate", train(float(sys.argv[2]), False), flush=True)
        os._exit(0)
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    rows = []
    with tempfile.TemporaryDirectory() as store:
        for _ in range(pairs):
            off = bare(seconds)
            handle = Launcher(RANKS, store=store).submit(train, seconds, True)
            on = handle.result()
            rows.append({"bare": off, "rankzero": on, "ratio": on / off})
            print(f"bare {off:8.1f} steps/s   rankzero {on:8.1f} steps/s   ratio {on / off:.3f}", flush=True)
    print(f"median ratio {statistics.median(row['ratio'] for row in rows):.3f}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
