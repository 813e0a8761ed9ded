"""GPUs of one machine, which its runs share out: pretended by variables and a program in the place of the driver's."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.conftest import find, until

from rankzero import InsufficientSlotsError, Launcher, StartTimeoutError
from rankzero.agent.ranks import visible_gpus
from rankzero.engines import gpus
from rankzero.engines.gpus import GpuClaims, local_gpus
from rankzero.train import TrainContext

WAIT = 60.0


# Other processes of the suite share the names of claims, too.
FIRST, SECOND, THIRD = IDS = [f"{os.getpid()}{number}" for number in range(3)]


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in gpus.VISIBLE:
        monkeypatch.delenv(name, raising=False)


def visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("name", "value", "listed"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,2", ["0", "2"]),
        ("CUDA_VISIBLE_DEVICES", "GPU-5a1b, 1,-1,3", ["GPU-5a1b", "1"]),
        ("CUDA_VISIBLE_DEVICES", "", []),
        ("HIP_VISIBLE_DEVICES", "1", ["1"]),
        ("ZE_AFFINITY_MASK", "0,1", ["0", "1"]),
    ],
)
def test_a_variable_limits_the_gpus(monkeypatch: pytest.MonkeyPatch, name: str, value: str, listed: list[str]) -> None:
    monkeypatch.setenv(name, value)
    assert local_gpus() == listed


@pytest.mark.parametrize(
    ("program", "listed"), [("print(2)", ["0", "1"]), ("print(0)", []), ("raise SystemExit(1)", [])]
)
def test_without_nvidias_tool_torch_counts(monkeypatch: pytest.MonkeyPatch, program: str, listed: list[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(gpus, "_COUNT", program)
    monkeypatch.setattr(gpus, "DEVICES", ("/dev/null",))
    assert local_gpus() == listed


def test_two_runs_never_hold_one_gpu() -> None:
    first, second = GpuClaims(), GpuClaims()
    assert first.take(IDS, 2)
    assert (first.held, second.free(IDS)) == ([FIRST, SECOND], [THIRD])
    # All or none.
    assert not second.take(IDS, 2)
    assert second.held == []
    assert second.take(IDS, 1)
    assert second.held == [THIRD]
    # A smaller world of the same run gives the rest back.
    assert first.take(IDS, 1)
    assert second.free(IDS) == [SECOND, THIRD]
    # A child that was forked meanwhile keeps nothing.
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(WAIT,))
    child.start()
    first.release()
    until(lambda: second.free(IDS) == IDS, WAIT, "all GPUs")
    child.kill()
    child.join()


def test_what_a_killed_run_held_is_free_again() -> None:
    program = (
        "from rankzero.engines import gpus; claims = gpus.GpuClaims(); "
        f"print(claims.take([{FIRST!r}], 1), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline() == "True\n"
    claims = GpuClaims()
    assert claims.free([FIRST]) == []
    other.kill()
    other.communicate()
    assert claims.take([FIRST], 1)
    claims.release()


def test_two_runs_of_one_machine_share_its_gpus_out(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(IDS))
    launcher = launcher.options(num_processes=1, use_gpu=True, backend="gloo")
    go = tmp_path / "go"

    def hold() -> str:
        until(go.exists, WAIT, "go")
        return visible()

    values: list[str] = []
    first = launcher.options(run_id="first")
    thread = threading.Thread(target=lambda: values.append(first.run(hold)))
    thread.start()
    until(lambda: (run := find(first)) and run.status().state == "running", WAIT, "the first run")
    assert launcher.options(num_processes=2).run(visible) == f"{SECOND},{THIRD}"
    # Waited for, like the places of a cluster; more than there are is known at once.
    with pytest.raises(StartTimeoutError, match="GPUs, some of which other runs use: it offers 2 of the 3"):
        launcher.options(num_processes=3, start_timeout=5.0).run(visible)
    with pytest.raises(InsufficientSlotsError, match="needs 4 GPUs.*offers 3"):
        launcher.options(num_processes=4).run(visible)
    go.touch()
    thread.join(WAIT)
    assert values == [FIRST]
    assert launcher.options(num_processes=(1, 8)).run(visible) == ",".join(IDS)


@pytest.mark.parametrize(
    ("ids", "env", "shown"),
    [
        ([], {}, {"CUDA_VISIBLE_DEVICES": ""}),
        (["0", "1"], {}, {"CUDA_VISIBLE_DEVICES": "0,1", "ZE_AFFINITY_MASK": "0,1"}),
        (["GPU-5a1b"], {}, {"CUDA_VISIBLE_DEVICES": "GPU-5a1b"}),
        # A host of AMD's GPUs shows all of them by a variable that counts more than CUDA's.
        ([], {"HIP_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
    ],
)
def test_a_rank_is_shown_the_gpus_of_its_task(ids: list[str], env: dict[str, str], shown: dict[str, str]) -> None:
    assert visible_gpus(ids, env) == shown


@pytest.mark.parametrize(("kind", "device"), [("cuda", "cuda:1"), ("xpu", "xpu:1"), (None, None)])
def test_the_device_is_that_of_torchs_accelerator(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, device: str | None
) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(str(kind)))
    here = TrainContext(local_rank=1, use_gpu=True)
    if device is None:
        with pytest.raises(RuntimeError, match="cannot use CUDA"):
            _ = here.device
    else:
        assert str(here.device) == device
