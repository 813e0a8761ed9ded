"""From a rank's death to the caller's error, and from ``cancel()`` to the last process gone. On this machine.

Run: ``python benchmarks/failure.py [kills] [cancels]``. Two ranks; the one that is not killed is blocked in a
collective, where it would wait for minutes. Prints a table of seconds (median, worst).
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from measure import Report

from rankzero import Launcher, RunHandle, WorkerFailedError

RANKS = 2
KILLS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 20
CANCELS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
LOOK = 0.01
WAIT = 120.0


def block(victim: int) -> None:
    """One rank waits outside of the collective that the others wait in."""
    import threading

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == victim:
        # Its peer has entered the collective, or is about to.
        print(f"victim {os.getpid()}", flush=True)
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


def victim_of(handle: RunHandle[None]) -> int:
    return next(int(line.split()[-1]) for line in handle.logs(follow=True) if "victim" in line)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_with(marker: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in environment and is_alive(int(name)) and int(name) != os.getpid():
            found.append(int(name))
    return found


def kill_once(launcher: Launcher, victim: int) -> float:
    """Seconds from the signal to the error in the caller."""
    handle = launcher.submit(block, victim)
    pid = victim_of(handle)
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    error = None
    try:
        handle.result(WAIT)
    except WorkerFailedError as caught:
        took, error = time.perf_counter() - killed, caught
    assert error, "the run succeeded"
    assert (error.rank, error.signal) == (victim, "SIGKILL"), error
    return took


def cancel_once(launcher: Launcher, marker: str) -> float:
    """Seconds from the request to the end of the last process, the driver's too."""
    handle = launcher.submit(block, 0)
    victim_of(handle)
    # All processes are there; looking for new ones would cost as much as what is measured.
    processes = processes_with(marker)
    assert len(processes) >= RANKS + 2
    asked = time.perf_counter()
    handle.cancel()
    while any(map(is_alive, processes)):
        if time.perf_counter() - asked > WAIT:
            raise AssertionError(f"processes are left: {processes_with(marker)}")
        time.sleep(LOOK)
    took = time.perf_counter() - asked
    assert processes_with(marker) == []
    assert handle.status().state == "cancelled"
    return took


def main() -> None:
    report = Report("failure", f"{RANKS} ranks, a failure and a cancel")
    # Before the first run, so that drivers and agents carry it too.
    marker = os.environ["RANKZERO_BENCHMARK"] = f"benchmark-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(RANKS, store=store)
        kills = [kill_once(launcher, number % RANKS) for number in range(KILLS)]
        cancels = [cancel_once(launcher, marker) for _ in range(CANCELS)]
    report.add("a rank's SIGKILL to the caller's error, peer in a collective", kills)
    report.add("cancel() to the last process gone", cancels)
    report.hold("worst of the kills, s", max(kills), 2.0)
    report.hold("worst of the cancels, s", max(cancels), 3.0)
    report.finish()


if __name__ == "__main__":
    main()
