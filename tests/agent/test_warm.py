"""The warm server: one import of torch for many runs, and nothing that one run leaves for the next."""

import contextlib
import importlib.util
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankzero import EngineError, InvalidJobError, Launcher
from rankzero.engines.local import LocalGroup
from rankzero.task import start
from rankzero.task.start import OWNER, load_time, start_time

SERVER = "rankzero.warm.server import main"
ENDED = 8.0
WAIT = 60.0


def test_what_scikit_learn_or_torchrun_set_names_no_other_server() -> None:
    loaded = {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "all", "KMP_AFFINITY": "none", "PATH": "/bin"}
    later = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE", "TORCHELASTIC_RUN_ID": "1"}
    later |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "LEARNING": "1"}
    assert load_time({**loaded, **later}) == loaded


def servers(owner: int | None = None) -> set[int]:
    """The warm servers that were started for a process."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        # ..., its owner, the owner's start time
        if any(SERVER in part for part in command) and command[-2] == str(owner or os.environ.get(OWNER, os.getpid())):
            found.add(process.pid)
    return found


def wait_until_gone(pids: set[int]) -> set[int]:
    """Those that are left after `ENDED` seconds."""
    deadline = time.monotonic() + ENDED
    while (left := {pid for pid in pids if psutil.pid_exists(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.soak
def test_every_rank_has_the_same_order_of_texts_warm_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else code that walks a set works on one machine, and on several its ranks wait for each other."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def order() -> list[int]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        found: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(found, hash("token"))
        return found

    launcher = Launcher(2, store=tmp_path)
    hashes = {*launcher.run(order), *launcher.options(warm_start=False).run(order)}
    assert len(hashes) == 1


def look_around() -> dict[str, Any]:
    """What a rank can see of the state of its process, before and after it spoils everything it can."""
    import decimal
    import locale

    import numpy
    import torch

    facts = {
        "server": psutil_free_parent(os.getppid()),
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
    assert first["server"] == second["server"]
    assert first["server"] in servers()
    assert all(one != other for one, other in zip(first.pop("seeds"), second.pop("seeds"), strict=True))
    assert first == second
    assert "SPOILED" not in first["environment"]


def server_of_this_rank() -> int:
    return psutil_free_parent(os.getppid())


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_drivers_share_the_server_of_a_process_that_outlives_them(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    if not shared:
        monkeypatch.delenv(OWNER)
    used = {launcher.options(num_processes=1).submit(server_of_this_rank).result(WAIT) for _ in range(2)}
    if shared:
        assert len(used) == 1
        assert used <= servers()
    else:
        assert len(used) == 2
        assert wait_until_gone(used) == set()


def test_a_fork_sees_what_a_started_process_sees(launcher: Launcher) -> None:
    alone = launcher.options(num_processes=1)
    warm, fresh = (alone.options(warm_start=choice).run(look_around) for choice in (True, False))
    for facts in (warm, fresh):
        del facts["seeds"], facts["server"]
    assert warm == fresh


def test_ranks_of_one_run_draw_different_numbers(launcher: Launcher) -> None:
    def draw() -> list[float]:
        import numpy
        import torch
        import torch.distributed as dist

        numbers = [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
        dist.init_process_group("gloo")
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, numbers)
        return [one - other for one, other in zip(*gathered, strict=True)]

    assert all(launcher.run(draw))


def test_a_module_that_was_edited_between_two_runs_is_the_new_one(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "edited_between_runs.py"
    script = tmp_path / "script.py"
    script.write_text("import edited_between_runs, rankzero.train as rt\nrt.set_result(edited_between_runs.VERSION)\n")
    module.write_text("VERSION = 1\n")
    assert launcher.run(script) == 1
    module.write_text("VERSION = 2  # the size differs too\n")
    assert launcher.run(script) == 2


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_installation_needs_another_server_and_a_first_import_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "single_file_module.py").touch()
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(sys, "dont_write_bytecode", not is_compiled)

    def key() -> str:
        return start._key({"code_path": "/code"}, os.getpid(), {})

    # Two changes within the resolution of the kernel's clock would have one time.
    os.utime(place, (0, 0))
    before = key()
    importlib.import_module("single_file_module")
    del sys.modules["single_file_module"]
    assert (place / "__pycache__").exists() == is_compiled
    assert key() == before
    for change in ((place / "acme-1.0.dist-info").mkdir, (place / "acme-1.0.dist-info").rmdir):
        os.utime(place, (0, 0))
        before = key()
        change()
        assert key() != before


def test_directories_that_come_onto_the_search_path_between_two_runs_are_found(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one begins in the directory of the launch. The server found neither when it loaded torch."""
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


def test_mask_limits_and_cores_are_those_of_now_and_not_of_the_first_run(launcher: Launcher) -> None:
    def look() -> list[Any]:
        import resource

        mask = os.umask(0)
        return [mask, resource.getrlimit(resource.RLIMIT_CORE)[0], sorted(os.sched_getaffinity(0))]

    before = launcher.run(look)
    cores = os.sched_getaffinity(0)
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    mask = os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (min(limits[0] if limits[0] >= 0 else 4096, 4096), limits[1]))
        os.sched_setaffinity(0, {min(cores)})
        now = [0o027, resource.getrlimit(resource.RLIMIT_CORE)[0], [min(cores)]]
        assert launcher.run(look) == now != before
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_CORE, limits)
        os.umask(mask)


def test_an_agent_that_comes_after_the_cancel_is_ended(tmp_path: Path) -> None:
    killed = threading.Event()

    class Agent:
        kill = staticmethod(killed.set)

    group = LocalGroup.__new__(LocalGroup)
    group._agent, group._cancelled = None, False
    group.cancel()
    group._on_start(Agent())  # type: ignore[arg-type]
    assert killed.is_set()


@pytest.mark.soak
def test_a_directory_of_caches_needs_no_server_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    def caches() -> list[Any]:
        import torch
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return [os.getppid(), psutil_free_parent(os.getppid()), cache_dir(), torch.hub.get_dir()]

    found = []
    for number in range(2):
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "XDG_CACHE_HOME")
        variables = {name: str(tmp_path / f"{name}-{number}") for name in names}
        chosen = launcher.options(num_processes=1, env={**(launcher.env or {}), **variables})
        found.append(chosen.run(caches))
        assert found[-1][2:] == [variables["TORCHINDUCTOR_CACHE_DIR"], variables["TORCH_HOME"] + "/hub"]
    assert found[0][1] == found[1][1]


@pytest.mark.soak
def test_idle_servers_of_other_environments_end(own_warm_servers: None, launcher: Launcher) -> None:
    """A service whose runs differ in a variable that torch reads when it is loaded has two servers, not one a run."""

    def look() -> list[Any]:
        import torch

        return [psutil_free_parent(os.getppid()), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]

    used = []
    for number, other in (("1", ""), ("2", ""), ("1", ""), ("1", "c"), ("1", "")):
        variables = {"OMP_NUM_THREADS": number, "TORCH_OF_A_TEST": other}
        chosen = launcher.options(num_processes=1, env={**(launcher.env or {}), **variables})
        server, *threads = chosen.run(look)
        assert threads == [int(number), number]
        used.append(server)
    first, second, _, third, _ = used
    assert used == [first, second, first, third, first]
    assert wait_until_gone({second}) == set()
    assert {first, third} <= servers()


def test_what_a_process_list_shows_of_a_fork_is_its_own(launcher: Launcher, marker: str) -> None:
    def show() -> list[str]:
        return [Path(f"/proc/self/{name}").read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]

    command, environment = launcher.run(show)
    assert command.rstrip().startswith("rankzero.worker.main local rank 0")
    assert f"MARK={marker}\0" in environment


@pytest.mark.soak
@pytest.mark.usefixtures("own_warm_servers")
def test_the_death_of_the_server_is_a_lost_host(launcher: Launcher, tmp_path: Path) -> None:
    def wait(folder: str) -> None:
        import rankzero.train as rt

        context = rt.get_context()
        Path(folder, f"up-{context.attempt}-{context.rank}").write_text(str(psutil_free_parent(os.getppid())))
        time.sleep(600)

    handle = launcher.options(max_restarts=1).submit(wait, str(tmp_path))
    for attempt in range(2):
        # A file is there before what is in it.
        while sum(bool(up.stat().st_size) for up in tmp_path.glob(f"up-{attempt}-*")) < 2:
            assert not handle.status().final
            time.sleep(0.02)
        os.kill(int((tmp_path / f"up-{attempt}-0").read_text()), signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        handle.result(120)
    assert caught.value.cause == "lost"
    assert [event["cause"] for event in handle.events() if event["type"] == "restart"] == ["lost"]


def test_what_a_killed_agent_left_is_ended_by_the_server(launcher: Launcher, tmp_path: Path) -> None:
    def leave_a_stranger(file: str) -> None:
        # No parent, session or environment by which anybody could find it.
        program = f"import os, time; open({file!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.Popen(["setsid", "--fork", sys.executable, "-c", program], env={})
        while not (os.path.exists(file) and os.path.getsize(file)):
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    file = tmp_path / "stranger"
    with pytest.raises(EngineError):
        launcher.options(num_processes=1).run(leave_a_stranger, str(file))
    assert wait_until_gone({int(file.read_text())}) == set()


@pytest.mark.usefixtures("own_warm_servers")
def test_a_server_ends_with_the_process_it_was_started_for(tmp_path: Path) -> None:
    program = (
        "import os, sys; from rankzero import Launcher\n"
        f"assert Launcher(1, store={str(tmp_path)!r}).run(int) == 0\n"
        "print(os.getpid(), flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    with process:
        # A start on a busy machine may say that it waits.
        owner = int(next(line for line in process.stdout if line.strip().isdigit()))
        (server,) = servers(owner)
        directory, path = map(Path, psutil.Process(server).cmdline()[-4:-2])
        assert directory.parent.stat().st_mode & 0o777 == 0o700
        assert path.is_socket()
        process.kill()
    assert wait_until_gone({server}) == set()
    assert not directory.exists()
    assert not path.exists()


@contextlib.contextmanager
def server_of(owner: int, directory: Path, changes: str) -> Iterator[subprocess.Popen[str]]:
    """A server with some of its constants or functions changed."""
    program = f"import time; from rankzero.warm import server as warm\n{changes}; warm.main()"
    started = start_time(owner)
    directory.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
        listener.listen()
        places = [str(directory), str(directory / "socket")]
        command = [sys.executable, "-c", program, *places, str(owner), started]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, stdin=listener, text=True, **pipes)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_whose_owner_dies_while_it_imports_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "server"
    with (
        subprocess.Popen(["sleep", "600"]) as owner,
        server_of(owner.pid, directory, "warm.loading.load = lambda _: (print(flush=True), time.sleep(600))") as server,
    ):
        try:
            assert server.stdout is not None
            server.stdout.readline()
            assert (directory / "socket").exists()
        finally:
            owner.kill()
            owner.wait()
        assert server.wait(60) == 1
    assert not directory.exists()


def test_a_module_that_hangs_while_it_is_loaded_ahead_delays_no_request(tmp_path: Path) -> None:
    (tmp_path / "hangs_at_import.py").write_text("import time\nprint(flush=True)\ntime.sleep(600)\n")
    changes = f"import os, sys; sys.path.append({str(tmp_path)!r}); warm.loading.PRELOADED_LATER = (); "
    changes += "os.environ['RANKZERO_PRELOAD'] = 'hangs_at_import,hangs_at_import'"
    with (
        server_of(os.getpid(), tmp_path / "server", changes) as server,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        assert server.stdout is not None
        server.stdout.readline()
        connection.settimeout(60)
        connection.connect(str(tmp_path / "server" / "socket"))
        connection.sendall(b"{}\n")
        assert connection.recv(100) == b""
        assert server.stderr is not None
        assert "RANKZERO_PRELOAD: hangs_at_import was not imported within" in server.stderr.readline()


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A server that is content with little idling."""
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "0.02")
    with server_of(os.getpid(), tmp_path / "server", "warm.loading.PRELOADED_LATER = ()") as process:
        yield process


@pytest.mark.soak
def test_a_server_ends_when_nobody_comes(lonely: subprocess.Popen[str], tmp_path: Path) -> None:
    assert lonely.wait(60) == 0
    assert not (tmp_path / "server").exists()


def test_a_request_that_makes_no_sense_harms_nobody(lonely: subprocess.Popen[str], tmp_path: Path) -> None:
    requests = (
        b"",
        b"{}\n",
        b"[]\n",
        b"nonsense\n",
        json.dumps({"env": {}, "directory": "/", "title": ""}).encode() + b"\n",
    )
    with contextlib.ExitStack() as connections:
        waiting = []
        # All of them before it has loaded torch: it idles for seconds only.
        for request in requests:
            connection = connections.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(60)
            connection.connect(str(tmp_path / "server" / "socket"))
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            waiting.append(connection)
        assert [connection.recv(100) for connection in waiting] == [b""] * len(requests)
    assert lonely.wait(60) == 0


def test_without_a_private_directory_ranks_start_as_interpreters(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        Path(short, f"rankzero-warm-{os.geteuid()}").mkdir(0o755)
        monkeypatch.setattr("tempfile.tempdir", short)
        alone = launcher.options(num_processes=1)
        assert alone.run(lambda: Path("/proc/self/cmdline").read_text().startswith(sys.executable)) is True


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="warm_start is 1; it must be True or False"):
        Launcher(1, warm_start=1)  # type: ignore[arg-type]


def write_module(archive: Path, value: int) -> None:
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("from_a_zip.py", f"VALUE = {value}\n")


def value_from_a_zip() -> int:
    import importlib

    return int(importlib.import_module("from_a_zip").VALUE)


@pytest.mark.soak
def test_an_archive_that_changes_is_read_again(tmp_path: Path) -> None:
    archive = tmp_path / "user.zip"
    launcher = Launcher(store=tmp_path / "store", env={"PYTHONPATH": str(archive)})
    for value in (1, 333):
        write_module(archive, value)
        assert launcher.run(value_from_a_zip) == value


READS_AGAIN = """
import importlib.util, json, sys, zipfile, zipimport
from rankzero.host import forked

archive = sys.argv[1]
read = []
real = zipimport._read_directory
zipimport._read_directory = lambda path: read.append(path) or real(path)


def write(text):
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("from_a_zip.py", text)


write("VALUE = 1")
sys.path.insert(0, archive)
importlib.util.find_spec("from_a_zip")
forked.prepare()
kept = sorted({type(finder).__name__ for finder in sys.path_importer_cache.values()})
read.clear()
forked._forget_search_path()
importlib.util.find_spec("from_a_zip")
unchanged = archive in read
write("VALUE = 22")
forked._forget_search_path()
importlib.util.find_spec("from_a_zip")
print(json.dumps([kept, unchanged, archive in read]))
"""


def run_python(program: str, *arguments: str) -> str:
    """What a program prints that works on its own process."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    ).stdout


def test_a_fork_reads_no_index_of_an_archive_again_that_has_not_changed(tmp_path: Path) -> None:
    # Spark's own archive is on every executor's path: its index took a tenth of a second in each process. Of
    # directories nothing is kept, which each fork would have to go through.
    kept, unchanged, changed = json.loads(run_python(READS_AGAIN, str(tmp_path / "spark.zip")))
    assert kept == ["zipimporter"]
    assert not unchanged
    assert changed


def leave_directories(place: str) -> None:
    """One before the end and one from an exit handler, which still sees the first."""
    import atexit
    import tempfile

    kept = []

    def look() -> None:
        (Path(place) / f"seen-{os.path.exists(kept[0].name)}").touch()
        kept.append(tempfile.TemporaryDirectory(dir=place))

    atexit.register(look)
    kept.append(tempfile.TemporaryDirectory(dir=place))


@pytest.mark.parametrize("warm_start", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_what_a_rank_leaves_to_finalizers_is_done_last(tmp_path: Path, warm_start: bool) -> None:
    # Those of the server's libraries are out of the way, so that nobody goes through them.
    (tmp_path / "place").mkdir()
    Launcher(store=tmp_path / "store", warm_start=warm_start).run(leave_directories, str(tmp_path / "place"))
    assert os.listdir(tmp_path / "place") == ["seen-True"]


TABLE_AT_EXIT = """
import atexit, logging, os, sys
from rankzero.warm import loading as warm

warm.load(warm.PRELOADED_LATER)
warm.settle_dynamo()
for level in ("INFO", "WARNING"):
    sys.stdout.flush()
    if not (child := os.fork()):
        logging.getLogger("torch._dynamo.utils").setLevel(level)
        sys.modules.pop("tabulate", None)
        atexit._run_exitfuncs()
        print(level, "tabulate" in sys.modules, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
os._exit(0)
"""


@pytest.mark.soak
def test_torchs_table_of_compile_times_is_made_for_who_reads_it() -> None:
    made, _, rest = run_python(TABLE_AT_EXIT).partition("INFO True")
    assert "TorchDynamo compilation metrics" in made
    assert rest.strip() == "WARNING False"
