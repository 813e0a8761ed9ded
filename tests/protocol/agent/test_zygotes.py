"""Zygotes: one import of torch for many launches, and nothing that one run leaves for the next."""

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from tests.conftest import find, is_alive, until

from rankzero import EngineError, Launcher, SparkEngine
from rankzero.driver import attempt
from rankzero.engines.local import LocalGroup
from rankzero.task import hold

WAIT = 60.0


def zygotes_of(owner: int | None = None) -> set[int]:
    """The zygotes that a process has started."""
    found = set()
    for child in psutil.Process(owner or os.getpid()).children():
        # One may have ended, and not be collected yet.
        with contextlib.suppress(psutil.Error):
            if "rankzero.task.zygote" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def look_around() -> dict[str, Any]:
    """What a rank can see of the state of its process, before and after it spoils everything it can."""
    import decimal
    import locale

    import numpy
    import torch

    facts = {
        "zygote": psutil_free_parent(os.getppid()),
        "environment": sorted(os.environ),
        "what C has of it": {
            name.decode()
            for name, _, value in (
                line.partition(b"=") for line in subprocess.check_output(["env", "-0"]).split(b"\0") if line
            )
            if os.environb.get(name) == value
        }
        ^ set(os.environ),
        "directory": os.getcwd(),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "path": [place for place in sys.path if not place.startswith(os.environ["RANKZERO_SCRATCH"])],
        "modules": sorted(name for name in sys.modules if name.startswith("spoiled")),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("spoiled")),
        "arguments": sys.argv[:],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "precision": decimal.getcontext().prec,
        "umask": os.umask(0o022),
        "loop": sys.version_info < (3, 14) and asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, "waited")),
        "cuda": torch.cuda.is_initialized(),
        "locale": locale.setlocale(locale.LC_ALL),
        "seeds": [torch.initial_seed(), random.random(), float(numpy.random.rand())],
    }
    os.environ["SPOILED"] = "1"
    os.chdir("/")
    os.open("/dev/null", os.O_RDONLY)
    sys.path.insert(0, "/spoiled")
    sys.modules["spoiled"] = sys
    vars(sys.modules["__main__"])["spoiled"] = 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    decimal.getcontext().prec = 5
    os.umask(0o077)
    return facts


def psutil_free_parent(pid: int) -> int:
    """The parent of a process, where psutil may not be installed."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_a_run_leaves_nothing_in_the_process_that_the_next_one_comes_from(launcher: Launcher) -> None:
    first = launcher.run(look_around)
    second = launcher.run(look_around)
    assert first["zygote"] == second["zygote"]
    assert all(one != other for one, other in zip(first.pop("seeds"), second.pop("seeds"), strict=True))
    assert first == second
    assert "SPOILED" not in first["environment"]


def test_a_fork_sees_what_a_started_process_sees(launcher: Launcher) -> None:
    alone = launcher.options(num_processes=1)
    warm, fresh = (alone.options(warm_start=choice).run(look_around) for choice in (True, False))
    for facts in (warm, fresh):
        del facts["seeds"], facts["zygote"]
    assert warm == fresh


@pytest.mark.usefixtures("own_zygotes")
def test_directories_that_come_onto_the_search_path_between_two_runs_are_found(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one begins in the directory of the launch. The zygote found neither when it loaded torch."""
    monkeypatch.chdir(tmp_path)

    def find() -> list[str]:
        names = ("comes_relative", "comes_absolute")
        return [importlib.import_module(name).PLACE for name in names if importlib.util.find_spec(name)]

    path = os.pathsep.join(["relative", str(tmp_path / "absolute")])
    later = launcher.options(env={**(launcher.env or {}), "PYTHONPATH": path})
    assert later.run(find) == []
    for place in ("relative", "absolute"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"comes_{place}.py").write_text(f"PLACE = '{place}'\n")
    assert later.run(find) == ["relative", "absolute"]


def test_a_warm_launch_removes_what_a_killed_process_has_left_and_nothing_in_use(launcher: Launcher) -> None:
    launcher.run(int)
    used, left = hold.Directory("agent"), hold.Directory("agent")
    left.log.close()
    for directory in (used, left):
        os.utime(directory.path, (0, 0))
    launcher.run(int)
    assert [os.path.exists(directory.path) for directory in (used, left)] == [True, False]
    used.close()


@pytest.mark.usefixtures("own_zygotes")
def test_a_rank_that_is_killed_before_its_launch_is_replaced_and_any_number_starts(launcher: Launcher) -> None:
    def ahead() -> list[psutil.Process]:
        return [rank for zygote in zygotes_of() for rank in psutil.Process(zygote).children(recursive=True)[1:]]

    launcher.run(int)
    for size in (2, 3, 1):
        killed, *_ = until(ahead, WAIT, "ranks that were forked ahead")
        killed.kill()
        until(lambda pid=killed.pid: not is_alive(pid), WAIT, "the end of one")
        assert launcher.options(num_processes=size).run(os.getenv, "WORLD_SIZE") == str(size)


def test_an_agent_that_comes_after_the_cancel_is_ended() -> None:
    group = LocalGroup.__new__(LocalGroup)
    group._agent, group._cancelled = None, False
    group.cancel()
    group._on_start(agent := Mock())
    agent.kill.assert_called_once()


@pytest.mark.usefixtures("own_zygotes")
def test_an_unknown_variable_or_another_mask_needs_another_zygote_and_a_variable_of_a_run_does_not(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[Any]:
        attempt, cores = os.environ["AIRFLOW_CTX_TRY_NUMBER"], sorted(os.sched_getaffinity(0))
        return [psutil_free_parent(os.getppid()), attempt, os.umask(0), cores]

    cores, before = os.sched_getaffinity(0), os.umask(0o022)
    usual, used = ("", 0o022, cores), list[int]()
    try:
        for variable, mask, own in (usual, ("", 0o027, {min(cores)}), usual, ("c", 0o022, cores), usual):
            os.umask(mask)
            os.sched_setaffinity(0, own)
            monkeypatch.setenv("AIRFLOW_CTX_TRY_NUMBER", str(len(used)))
            chosen = launcher.options(num_processes=1, env={**(launcher.env or {}), "UNKNOWN": variable})
            zygote, *seen = chosen.run(look)
            assert seen == [str(len(used)), mask, sorted(own)]
            used.append(zygote)
    finally:
        os.sched_setaffinity(0, cores)
        os.umask(before)
    first, second, _, third, _ = used
    assert used == [first, second, first, third, first]
    # A driver keeps two.
    assert zygotes_of() == {first, third}


STAYS = """
import os, sys
from rankzero import Launcher
assert Launcher(1, store=sys.argv[1]).run(int) == 0
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_zygote_ends_with_its_owner(tmp_path: Path, how: str) -> None:
    """Also if a child of the owner that was killed has the other end of its socket."""
    program = STAYS.replace("print(", "os.fork() or time.sleep(8)\nprint(") if how == "kill" else STAYS
    command = [sys.executable, "-c", f"import time{program}", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        assert owner.stdin
        next(line for line in owner.stdout if line.strip() == str(owner.pid))
        (zygote,) = zygotes_of(owner.pid)
        if how == "exit":
            owner.stdin.close()
        else:
            owner.kill()
        until(lambda: not is_alive(zygote), 5.0, "the end of the zygote")


def test_an_idle_zygote_ends_and_the_next_launch_has_another(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, own_zygotes: str
) -> None:
    launcher = launcher.options(num_processes=1, env={**(launcher.env or {}), "RANKZERO_TIME_SCALE": "0.01"})
    zygote = lambda: psutil_free_parent(os.getppid())  # noqa: E731
    first = launcher.run(zygote)
    until(lambda: not is_alive(first), WAIT, "the end of an idle zygote")
    monkeypatch.setenv(hold.SHARED, own_zygotes)
    assert launcher.run(zygote) != first


def test_a_launch_that_an_idle_zygote_does_not_answer_goes_to_another_one(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, own_zygotes: str
) -> None:
    """The first one is stopped, so that it reads its launch when it is let go of, while the next one has it, too."""
    launcher = launcher.options(num_processes=1)

    def look(seconds: float) -> list[Any]:
        time.sleep(seconds)
        return [psutil_free_parent(os.getppid()), os.path.isdir(os.environ["RANKZERO_SCRATCH"])]

    first, _ = launcher.run(look, 0)
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setenv(hold.SHARED, own_zygotes)
    monkeypatch.setattr(attempt, "PRELOAD_TIMEOUT", lambda: 4.0)
    # As on a busy machine.
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: (time.sleep(1.0), kill(process)))
    second, has_directory = launcher.run(look, 3.0)
    assert second != first
    assert has_directory


def test_what_a_zygote_says_of_an_agent_that_was_killed_after_its_last_act_is_no_answer_to_a_launch() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b'{"status": -9}\n')
        zygote = hold.Zygote(ours, "")
        assert not zygote.launch({}, WAIT)
    zygote.close()


AS_THE_REST_IS_IMPORTED = """
import os, sys
from rankzero.host import forks
class Finder:
    def find_spec(name, *_):
        if name == "torch._dynamo":
            ACT
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.usefixtures("own_zygotes")
def test_a_zygote_that_opens_a_gpu_when_it_is_idle_ends(launcher: Launcher, module_ahead: Path) -> None:
    act = 'forks._GPU_DEVICES, sys.kept = ("/dev/zero",), open("/dev/zero")'
    module_ahead.write_text(AS_THE_REST_IS_IMPORTED.replace("ACT", act))
    zygote = launcher.options(num_processes=1).run(os.getppid) and zygotes_of().pop()
    until(lambda: not is_alive(zygote), WAIT, "the end of the zygote")


@pytest.mark.usefixtures("own_zygotes")
def test_a_zygote_imports_the_rest_while_its_first_agent_runs(launcher: Launcher, module_ahead: Path) -> None:
    """Else each rank of a restart would import it, for a second."""
    note = module_ahead.with_suffix(".note")
    module_ahead.write_text(AS_THE_REST_IS_IMPORTED.replace("ACT", f"os.symlink(str(os.getpid()), {str(note)!r})"))
    launcher = launcher.options(num_processes=1, env={**(launcher.env or {}), "RANKZERO_TIME_SCALE": "0.1"})
    zygote = launcher.run(lambda: until(note.is_symlink, WAIT, "the import") and psutil_free_parent(os.getppid()))
    assert zygote == int(os.readlink(note))


@pytest.fixture
def module_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that a zygote imports after torch."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RANKZERO_PRELOAD", "module_loaded_ahead")
    return tmp_path / "module_loaded_ahead.py"


def is_fork() -> bool:
    return "rankzero.task.zygote" in Path("/proc/self/cmdline").read_text()


NOTES_WHAT_IT_IS_ASKED_WITH = """
import os, torch
torch.accelerator.is_available = lambda: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
torch.cuda.is_available, seen = lambda: True, []
"""


@pytest.mark.usefixtures("own_zygotes")
def test_torch_is_asked_for_devices_once_a_rank_sees_only_its_own(
    launcher: Launcher, module_ahead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank of the second launch was forked ahead."""
    own = f"{os.getpid()}9"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{own},{own}9")
    module_ahead.write_text(NOTES_WHAT_IT_IS_ASKED_WITH)
    launcher = launcher.options(num_processes=1, use_gpu=True)
    for _ in range(2):
        assert launcher.run(lambda: importlib.import_module("module_loaded_ahead").seen) == [own]


OPENS_A_GPU = """
from rankzero.host import forks
forks._GPU_DEVICES = ("/dev/zero",)
kept = open("/dev/zero")
"""


@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.parametrize(
    ("source", "is_warm", "line"),
    [
        ("import time; time.sleep(600)", False, "that took more than 3 s"),
        ("import os; os._exit(3)", False, "torch could not be loaded ahead"),
        (OPENS_A_GPU, False, "has opened a GPU"),
        ("raise SystemExit('no')", True, "module_loaded_ahead could not be loaded ahead (SystemExit('no'))"),
    ],
)
def test_a_module_that_cannot_be_loaded_ahead_costs_a_line(
    launcher: Launcher, module_ahead: Path, monkeypatch: pytest.MonkeyPatch, source: str, is_warm: bool, line: str
) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.15" if "600" in source else "6")
    module_ahead.write_text(source)
    launcher = launcher.options(num_processes=1, run_id="one")
    assert launcher.run(is_fork) is is_warm
    handle = find(launcher)
    assert handle
    assert [line in one for one in handle.logs() if "ahead" in one] == [True]
    # The next launch waits for nothing.
    assert launcher.options(run_id="two").run(is_fork) is is_warm


@pytest.mark.usefixtures("own_zygotes")
def test_a_zygote_ends_with_an_owner_that_dies_while_it_imports(tmp_path: Path, module_ahead: Path) -> None:
    note = tmp_path / "zygote"
    module_ahead.write_text(f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", STAYS, str(tmp_path / "store")]) as owner:
        zygote = int(until(lambda: note.exists() and note.read_text(), WAIT, "the import"))
        owner.kill()
    until(lambda: not is_alive(zygote), 5.0, "the end of the zygote")


@pytest.mark.usefixtures("own_zygotes")
@pytest.mark.parametrize("how", ["shared", "own", pytest.param("killed", marks=pytest.mark.soak)])
def test_the_tasks_of_an_embedded_spark_share_a_process_that_imports_torch_while_the_jvm_starts(
    tmp_path: Path, how: str
) -> None:
    """Those that have a variable which the driver does not have need zygotes of their own."""

    def look() -> list[int]:
        above = psutil_free_parent(psutil_free_parent(os.getppid()))
        (tmp_path / f"rank-{os.environ['RANK']}-{above}").touch()
        places = lambda: list(tmp_path.glob("rank-*"))  # noqa: E731
        until(lambda: len(places()) == 2, WAIT, "both ranks")
        if how == "killed" and os.environ["RANK"] == "0":
            os.kill(above, signal.SIGKILL)
        return [int(place.name.rpartition("-")[2]) for place in places()]

    conf = {"spark.executorEnv.UNKNOWN": "1"} if how == "own" else {}
    one, other = Launcher(2, engine=SparkEngine("local[2]", conf=conf), store=tmp_path / "store").run(look)
    assert (one == other) is (how != "own")
    until(lambda: not is_alive(one) and not is_alive(other), 5.0, "their end")


def leave_directories(place: str) -> None:
    """One before the end and one from an exit handler, which still sees the first."""
    import atexit

    kept = []

    def look() -> None:
        (Path(place) / f"seen-{os.path.exists(kept[0].name)}").touch()
        kept.append(tempfile.TemporaryDirectory(dir=place))

    atexit.register(look)
    kept.append(tempfile.TemporaryDirectory(dir=place))


@pytest.mark.parametrize("warm_start", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_what_a_rank_leaves_to_finalizers_is_done_last(tmp_path: Path, warm_start: bool) -> None:
    # Those of the zygote's libraries are out of the way, so that nobody goes through them.
    (tmp_path / "place").mkdir()
    Launcher(store=tmp_path / "store", warm_start=warm_start).run(leave_directories, str(tmp_path / "place"))
    assert os.listdir(tmp_path / "place") == ["seen-True"]


@pytest.mark.usefixtures("own_zygotes")
def test_a_signal_to_the_whole_tree_leaves_ranks_their_grace(tmp_path: Path, launcher: Launcher) -> None:
    def wait(folder: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: Path(folder, "asked").touch())
        Path(folder, "up").touch()
        until(lambda: Path(folder, "asked").exists(), WAIT, "SIGTERM")
        Path(folder, "saved").touch()
        time.sleep(WAIT)

    launcher = launcher.options(num_processes=1, max_preemptions=0)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(launcher.run, wait, str(tmp_path))
        until((tmp_path / "up").exists, WAIT, "a rank")
        (zygote,) = zygotes_of()
        (agent,) = psutil.Process(zygote).children()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(zygote, number)
        agent.send_signal(signal.SIGTERM)
        with pytest.raises(EngineError) as caught:
            running.result(WAIT)
    assert caught.value.cause == "preempted"
    assert (tmp_path / "saved").exists()


def test_a_late_cancel_kills_no_agent_of_a_later_run(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[LocalGroup] = []
    start = LocalGroup._on_start
    monkeypatch.setattr(LocalGroup, "_on_start", lambda group, agent: (groups.append(group), start(group, agent))[1])

    def wait(folder: str) -> int:
        Path(folder, "up").touch()
        until(lambda: Path(folder, "go").exists(), WAIT, "the late cancel")
        return 1

    launcher = launcher.options(num_processes=1)
    assert launcher.run(os.getppid)
    until(lambda: groups[0]._agent.has_ended, WAIT, "an idle zygote")
    groups[0].cancel()
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(launcher.run, wait, str(tmp_path))
        until((tmp_path / "up").exists, WAIT, "a rank")
        groups[0].cancel()
        (tmp_path / "go").touch()
        assert running.result(WAIT) == 1
