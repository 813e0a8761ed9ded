"""A state dict as result: rank 0 returns it, the next step loads it; beside a raw safetensors save and load.

Run: ``python benchmarks/results.py [megabytes ...]``. Every value of the loaded tensors is used once on both sides.
Virtual machines hand free memory back to their host, and the first to use it again waits: so before each turn of either
side all that it will need is asked for, and let go.
"""

import mmap
import os
import shutil
import sys
import tempfile
import threading
import time

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import psutil
from measure import Report
from pyspark.sql import SparkSession

from rankzero import Launcher, SparkEngine

SIZES = [int(size) for size in sys.argv[1:] if size.isdigit()] or [256, 4096]
RUNS = 6
TENSORS = 16
MB = 1 << 20
SAMPLE_INTERVAL = 0.05
"""Seconds between two looks at the memory of a process, in a run that is not timed: a look walks all its pages."""


def make_state(megabytes: int) -> dict[str, object]:
    import torch

    values = megabytes * MB // 4 // TENSORS
    return {f"layer{number}": torch.full((values,), float(number)) for number in range(TENSORS)}


def use(state: dict[str, object]) -> float:
    return sum(float(tensor.max()) for tensor in state.values())  # type: ignore[attr-defined]


def ask_for_memory(megabytes: int) -> None:
    """Has the host give what a turn needs: the tensors, and their file in the page cache."""
    with mmap.mmap(-1, 2 * megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for start in range(0, len(memory), MB):
            memory[start : start + MB] = bytes(MB)


def raw(megabytes: int, directory: str) -> float:
    """Seconds of a safetensors save, with its bytes on the disk as ours are, and a load."""
    from safetensors.torch import load_file, save_file

    ask_for_memory(megabytes)
    state = make_state(megabytes)
    path = os.path.join(directory, "raw.safetensors")
    started = time.perf_counter()
    save_file(state, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    del state
    use(load_file(path))
    took = time.perf_counter() - started
    os.unlink(path)
    return took


def make_and_note(megabytes: int, note: str) -> dict[str, object]:
    if os.environ["RANK"] != "0":
        # Else the two make their tensors, and let go of them, at the same time.
        return {}
    state = make_state(megabytes)
    with open(note, "w") as file:
        file.write(str(time.time()))
    return state


class Peak(threading.Thread):
    """The most memory of its own that a process had."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.done = process, 0, threading.Event()
        self.before = self.own()

    def own(self) -> int:
        info = self.process.memory_full_info()
        return int(info.uss)

    def run(self) -> None:
        while not self.done.wait(SAMPLE_INTERVAL):
            self.most = max(self.most, self.own())

    def grown(self) -> float:
        self.done.set()
        self.join()
        return (max(self.most, self.own()) - self.before) / MB


def one(launcher: Launcher, megabytes: int, store: str) -> float:
    """Seconds from the function's return until the caller has used every value."""
    ask_for_memory(megabytes)
    note = os.path.join(store, "note")
    state = launcher.run(make_and_note, megabytes, note)
    use(state)
    took = time.time() - float(open(note).read())
    del state
    shutil.rmtree(os.path.join(store, str(launcher.run_id)))
    return took


def main() -> None:
    report = Report("results", "Rank 0 returns tensors, the next step loads them")
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    jvm = next(child for child in psutil.Process().children(recursive=True) if "java" in child.name())
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as store:
        launcher = Launcher(2, engine=SparkEngine(session=spark), store=store)
        launcher.run(make_and_note, 1, os.path.join(store, "note"))
        for megabytes in SIZES:
            ours, theirs = [], []
            for number in range(RUNS):
                named = launcher.options(run_id=f"big-{megabytes}-{number}")
                # Who comes second may find memory that the first has let go of.
                if number % 2:
                    ours.append(one(named, megabytes, store))
                theirs.append(raw(megabytes, store))
                if not number % 2:
                    ours.append(one(named, megabytes, store))
            # One more that is not timed. Mapped pages are the file's, so nothing is used yet.
            peaks = {"driver": Peak(psutil.Process()), "JVM": Peak(jvm)}
            for peak in peaks.values():
                peak.start()
            looked_at = launcher.options(run_id=f"big-{megabytes}")
            state = looked_at.run(make_and_note, megabytes, os.path.join(store, "note"))
            grown = {name: peak.grown() for name, peak in peaks.items()}
            del state
            shutil.rmtree(os.path.join(store, f"big-{megabytes}"))
            own = report.add(f"{megabytes} MB: from the function's return to the values used by the caller", ours)
            floor = report.add(f"{megabytes} MB: safetensors save, fsync, load, use", theirs)
            report.hold(f"{megabytes} MB, ours / raw", own / floor, 1.6)
            for name, size in grown.items():
                report.hold(f"{megabytes} MB, growth of the {name}'s own memory in MB", size, 64)
    report.finish()
    spark.stop()


if __name__ == "__main__":
    main()
