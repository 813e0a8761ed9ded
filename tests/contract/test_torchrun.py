"""What code that was written for torchrun finds: its variables, its store, its ways to end."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tests.conftest import free_port

from rankzero import Launcher, WorkerFailedError

WANTED: dict[str, str | None] = {
    "LOCAL_RANK": "0",
    "RANK": "0",
    "GROUP_RANK": "0",
    "ROLE_RANK": "0",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "2",
    "TORCHELASTIC_RUN_ID": "elastic",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "MASTER_PORT": None,
    "TORCHELASTIC_ERROR_FILE": None,
    "OMP_NUM_THREADS": None,
}
"""What rank 0 of 2 finds in its second attempt; None for what is another in every run."""


def script(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(source))
    return path


def test_a_script_finds_all_that_torchrun_sets(launcher: Launcher, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"""
        import argparse, json, os, sys
        import torch, torch.distributed as dist
        import rankzero.train as rt

        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, required=True)
        assert parser.parse_args().local_rank == int(os.environ["LOCAL_RANK"])
        assert dist.is_torchelastic_launched()
        port = os.environ["MASTER_PORT"]
        for method in ("env://", f"tcp://localhost:{{port}}"):
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
            one_hot = torch.nn.functional.one_hot(torch.tensor(dist.get_rank()), num_classes=size)
            dist.all_reduce(one_hot)
            assert one_hot.sum() == size
            dist.destroy_process_group()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
            os.kill(os.getpid(), 9)
        rt.set_result({{name: os.environ[name] for name in {[*WANTED]}}})
        """,
    )
    found = launcher.options(max_restarts=2, run_id="elastic").run(path, "--local_rank=${local_rank}")
    assert {name: found[name] for name, value in WANTED.items() if value} == {
        name: value for name, value in WANTED.items() if value
    }
    assert os.path.basename(found["TORCHELASTIC_ERROR_FILE"]) == "error-0.json"
    assert int(found["OMP_NUM_THREADS"]) >= 1


def test_a_rank_may_ask_for_the_store_alone_and_meet_its_peers_elsewhere(launcher: Launcher) -> None:
    own = str(free_port())

    def train() -> tuple[list[float], list[bool]]:
        import torch
        import torch.distributed as dist

        rendezvous = sys.modules["torch.distributed.rendezvous"]
        sums, served, plain = [], [], rendezvous.TCPStore
        # The owner of a server looks only every 10 ms whether all ranks have connected.
        rendezvous.TCPStore = lambda **how: served.append(how["is_master"]) or plain(**how)
        for port in (os.environ["MASTER_PORT"], os.environ["MASTER_PORT"], own):
            os.environ["MASTER_PORT"] = port
            if os.environ["RANK"] == "1" and port != own:
                store, rank, world_size = next(dist.rendezvous("env://"))
                assert (rank, world_size) == (1, 2)
                store.set("alone", "1")
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.barrier()
            dist.destroy_process_group()
            sums.append(total.item())
        return sums, served

    assert launcher.options(timeout=60).run(train) == ([2.0, 2.0, 2.0], [False, False, True])


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_with_code_0_is_an_end(launcher: Launcher, tmp_path: Path, code: int | None) -> None:
    def train() -> str:
        import rankzero.train as rt

        rt.set_result("of the function")
        sys.exit(code)

    path = script(tmp_path, f"import sys, rankzero.train as rt; rt.set_result('of the script'); sys.exit({code})")
    assert launcher.options(num_processes=1).run(train) == "of the function"
    assert launcher.options(num_processes=1).run(path) == "of the script"


def test_a_driver_imports_nothing_from_the_working_directory(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "project"
    elsewhere.mkdir()
    for name in ("secrets", "queue", "selectors"):
        (elsewhere / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w'); raise ImportError")
    monkeypatch.chdir(elsewhere)
    handle = launcher.options(num_processes=1).submit(int)
    assert handle.result(60) == 0
    assert not (tmp_path / "imported").exists()


def test_an_exception_whose_text_raises_keeps_its_type_and_traceback(launcher: Launcher) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    def train() -> None:
        raise Broken

    with pytest.raises(WorkerFailedError, match="its text cannot be had: KeyboardInterrupt") as caught:
        launcher.options(num_processes=1).run(train)
    assert str(caught.value.exception_type).endswith("Broken")
    assert "raise Broken" in str(caught.value.traceback)


def leave_late() -> str:
    def work() -> None:
        time.sleep(600.0)

    threading.Thread(target=work, name="upload").start()
    return "value"


def test_what_the_end_of_a_rank_cuts_off_is_in_its_log(launcher: Launcher) -> None:
    handle = launcher.options(num_processes=1, exit_timeout=0.2).submit(leave_late)
    assert handle.result(60) == "value"
    lines = list(handle.logs(rank=0, follow=True))
    assert any("exit_timeout=0.2 s, which cut off the thread 'upload'." in line for line in lines)
    assert any(line.endswith(" in work") for line in lines)
