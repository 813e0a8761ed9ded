"""What a host does, sampled: against what is really done here."""

import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from rankzero import Launcher, RunHandle
from rankzero.host import usage
from rankzero.host.usage import USAGE_FIRST_SAMPLE, USAGE_INTERVAL_MAX, USAGE_INTERVAL_MIN, UsageSampler


def test_work_and_memory_show() -> None:
    sampler = UsageSampler(use_gpu=False, now=time.monotonic())
    ended = threading.Event()
    worker = threading.Thread(target=lambda: [None for _ in iter(ended.is_set, True)])
    worker.start()
    time.sleep(USAGE_FIRST_SAMPLE)
    sample = sampler.sample(time.monotonic())
    ended.set()
    worker.join()
    assert 0.2 < sample["cpu"] <= sample["cores"] * 1.1
    assert 0 < sample["memory"] < sample["memory_total"]
    assert sample["memory_total"] <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert "gpus" not in sample


def test_a_long_run_is_sampled_ever_less() -> None:
    sampler = UsageSampler(use_gpu=False, now=0.0)
    moments = [0.0]
    while moments[-1] < 86400:
        moments.append(sampler.next_at)
        sampler.sample(moments[-1])
    gaps = [after - before for before, after in itertools.pairwise(moments[1:])]
    assert min(gaps) >= USAGE_INTERVAL_MIN
    assert max(gaps) <= USAGE_INTERVAL_MAX + 1e-6
    assert len(moments) < 2_000


def test_one_agent_of_a_host_samples_for_all(tmp_path: object) -> None:
    launcher = Launcher(2, store=str(tmp_path), run_id="sampled")
    launcher.run(time.sleep, 2.5)
    samples = [event for event in RunHandle.attach(f"{tmp_path}/sampled").events() if event["type"] == "usage"]
    assert samples
    gaps = [after["time"] - before["time"] for before, after in itertools.pairwise(samples)]
    assert all(gap > USAGE_INTERVAL_MIN / 2 for gap in gaps), "two of them sample"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 8),
        ({}, 8),
    ],
)
def test_a_quota_limits_the_cores_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(usage, "GROUPS", str(tmp_path))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usage.available_cores() == cores
