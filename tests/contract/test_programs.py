"""What is run besides functions and scripts: modules as ``python -m`` runs them, and commands."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.tries.identities import identity_of

from rankzero import InvalidJobError, Launcher, RunHandle, WorkerFailedError
from rankzero.submit.pack import Payload, build
from rankzero.worker import failures
from rankzero.worker.failures import CommandError, describe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    place = tmp_path / "project"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def package(folder: Path) -> None:
    jobs = folder / "jobs"
    jobs.mkdir()
    (jobs / "__init__.py").write_text("")
    (jobs / "part.py").write_text("SIZE = 4\n")
    main = "import sys\nimport rankzero.train as rt\nfrom .part import SIZE\n"
    main += "rt.set_result([__name__, __spec__.name, *sys.argv[1:], SIZE])\nsys.exit(0)\n"
    (jobs / "__main__.py").write_text(main)
    (jobs / "train.py").write_text(main)


@pytest.mark.parametrize(("module", "name"), [("jobs", "jobs.__main__"), ("jobs.train", "jobs.train")])
def test_a_module_is_run_as_python_does(launcher: Launcher, folder: Path, module: str, name: str) -> None:
    package(folder)
    value = launcher.options(num_processes=1).run(f"-m {module}", "--lr", 0.1)
    assert value == ["__main__", name, "--lr", "0.1", 4]


def test_a_module_counts_by_its_code(folder: Path) -> None:
    package(folder)
    before = identity_of("-m jobs", (), {}, 1)
    assert identity_of("-m jobs", (), {}, 1) == before
    assert identity_of("-m jobs.train", (), {}, 1) != before
    (folder / "jobs" / "part.py").write_text("SIZE = 55\n")
    assert identity_of("-m jobs", (), {}, 1) != before


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ("-m no_such_package.train", "there is no module 'no_such_package'"),
        ("-m jobs --lr 1", "names no module: write '-m package.module', its arguments apart"),
        ([], "a command is a list of strings"),
        (["bash", 3], "a command is a list of strings"),
    ],
)
def test_a_program_that_is_not_there_is_refused(folder: Path, train: Any, problem: str) -> None:
    package(folder)
    with pytest.raises(InvalidJobError, match=problem):
        build(train, (), {})


def test_programs_take_no_keywords_and_commands_no_hang_timeout(launcher: Launcher) -> None:
    with pytest.raises(InvalidJobError, match="a command takes positional arguments only.*write '--lr', value"):
        launcher.run(["true"], lr=1)
    with pytest.raises(InvalidJobError, match="a command reports no progress"):
        launcher.options(hang_timeout=5.0).run(["true"])


def test_a_command_runs_on_every_rank_with_the_files_of_the_working_directory(launcher: Launcher, folder: Path) -> None:
    (folder / "train").write_text('#!/bin/bash\necho "$(cat one/settings) ${@}" > "$OUT/$RANK"\n')
    (folder / "train").chmod(0o755)
    (folder / "one").mkdir()
    (folder / "one" / "settings").write_text("blue")
    launcher = launcher.options(env={**(launcher.env or {}), "OUT": str(folder)}, working_dir=folder)
    handle = launcher.submit(["./train", "--rank=${local_rank}"], "--lr", 0.1)
    (folder / "train").unlink()
    assert handle.result(60) is None
    assert [(folder / rank).read_text() for rank in "01"] == [f"blue --rank={n} --lr 0.1\n" for n in "01"]


@pytest.mark.parametrize(
    ("line", "code", "signal"), [("echo oh no; exit 3", 3, None), ("echo oh no; kill -9 $$", None, "SIGKILL")]
)
def test_a_command_that_fails_is_a_failed_rank(
    launcher: Launcher, line: str, code: int | None, signal: str | None
) -> None:
    with pytest.raises(WorkerFailedError, match=r"the command .*(exited with code 3|killed by SIGKILL)") as caught:
        launcher.options(num_processes=1).run(["bash", "-c", line])
    assert (caught.value.exit_code, caught.value.signal) == (code, signal)
    assert caught.value.log_tail == ["oh no"]


def test_a_command_is_told_to_end_and_has_the_grace(launcher: Launcher, folder: Path) -> None:
    line = "trap 'echo saved; exit 1' TERM; echo up; while :; do sleep 0.05; done"
    handle = launcher.options(num_processes=1, stop_grace=20.0).submit(["bash", "-c", line])
    until(lambda: "up" in list(handle.logs(rank=0)), 60, "the command's start")
    handle.cancel()
    assert handle.wait(60)
    assert list(handle.logs(rank=0))[-1] == "saved"


TOLD_WHILE_IT_STARTS = """
import os, signal, subprocess
from rankzero.worker.call import run_command
from rankzero.worker.failures import CommandError

start = subprocess.Popen

def start_slowly(command):
    # The command is up, and the rank gets no processor for a moment.
    process = start(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\\n"
    os.kill(os.getpid(), signal.SIGTERM)
    return process

subprocess.Popen = start_slowly
try:
    run_command(["bash", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done"])
except CommandError as error:
    print(error)
"""


def test_a_command_is_told_to_end_the_moment_it_starts() -> None:
    done = subprocess.run([sys.executable, "-c", TOLD_WHILE_IT_STARTS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "exited with code 7" in done.stdout


def test_a_python_command_meets_its_peers_and_says_why_it_failed(launcher: Launcher) -> None:
    source = """
        import atexit, os, time, torch, torch.distributed as dist
        from torch.distributed.elastic.multiprocessing.errors import record

        def leave_after(peer):
            while os.path.exists(f"/proc/{peer}"):
                time.sleep(0.01)
            os._exit(1)

        @record
        def main():
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            pids = [None, None]
            dist.all_gather_object(pids, os.getpid())
            if dist.get_rank() == 1:
                # Its peer sees that it is gone, and ends, before this process does.
                dist.destroy_process_group()
                atexit.register(leave_after, pids[0])
                raise ValueError(f"the sum is {total.item()}")
            try:
                dist.barrier()
            finally:
                # Its threads may abort an interpreter that ends with an open group.
                dist.destroy_process_group()

        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    with pytest.raises(WorkerFailedError, match="ValueError: the sum is 2.0") as caught:
        launcher.options(timeout=120).run(command)
    assert caught.value.rank == 1
    assert "in main" in str(caught.value.traceback)


FAILED = "exited with code 1"


@pytest.mark.parametrize(
    ("facts", "is_echo", "matched"),
    [
        ({"traceback": "torch.distributed.DistBackendError"}, True, FAILED),
        ({"traceback": "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"}, True, FAILED),
        ({"traceback": "torch.distributed.DistBackendError: x\n\nDuring ...\n\nValueError: step failed"}, True, FAILED),
        ({"traceback": "  | torch.distributed.DistStoreError: x"}, True, FAILED),
        ({"traceback": "RuntimeError: out of range"}, False, FAILED),
        ({"traceback": "geo.DistanceTooLargeError"}, False, FAILED),
        ({"exception_type": "OSError", "message": "Stale"}, False, "OSError: Stale"),
        ({"exit_code": 7}, False, None),
    ],
)
def test_what_is_known_of_the_end_of_a_command(facts: dict[str, Any], is_echo: bool, matched: str | None) -> None:
    known = {"exception_type": "E", "message": "", "exit_code": 1, "traceback": "", **facts}
    if known["traceback"]:
        known["traceback"] = f"Traceback ...\n{known['traceback']}\n"
    failures.install_restart_on(pickle.dumps(("OSError: Stale", FAILED)))
    try:
        failure = describe(CommandError(f"the command 'x' exited with code {known['exit_code']}", known))
    finally:
        failures.install_restart_on(None)
    assert (failure.collateral, failure.matched) == (is_echo, matched)


def test_a_launcher_in_a_process_that_multiprocessing_spawned_refuses(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from rankzero import Launcher

            def train():
                process = multiprocessing.get_context("spawn").Process(target=print)
                process.start()
                process.join()
                return process.exitcode

            print("value", Launcher(1, store={str(tmp_path / "store")!r}, start_timeout=240).run(train))
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("value 1") == 1
    assert "put the call below `if __name__ == '__main__':`" in done.stdout
    (run,) = (tmp_path / "store").iterdir()
    assert RunHandle.attach(run).result() == 1


def test_a_spawned_process_runs_a_script_that_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """The function needs no such module, so none is sent; multiprocessing runs the whole script again."""
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from beside import NUMBER
            from rankzero import Launcher

            class Row:
                pass

            def leave(row):
                raise SystemExit(5)

            def train():
                process = multiprocessing.get_context("spawn").Process(target=leave, args=(Row(),))
                process.start()
                process.join()
                return process.exitcode

            if __name__ == "__main__":
                print("value", Launcher(1, store={str(tmp_path / "store")!r}).run(train))
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "value 5\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["function", "module", "script"])
def test_a_module_has_the_code_and_the_data_that_were_submitted(
    launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    package = folder / "src" / "placed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "late.py").write_text("CODE = 'submitted'\n")
    (package / "data.txt").write_text("data")
    (package / "job.py").write_text(
        "import rankzero.train as rt\nfrom pathlib import Path\n"
        "def train():\n"
        f"    Path({str(package / 'late.py')!r}).write_text('CODE = \"edited\"\\n')\n"
        f"    Path({str(package / 'data.txt')!r}).write_text('edited')\n"
        "    from placed import late\n"
        "    import inspect\n    assert 'submitted' in inspect.getsource(late)\n"
        "    value = [late.CODE, Path(__file__).with_name('data.txt').read_text()]\n"
        "    rt.set_result(value)\n"
        "    return value\n"
        "if __name__ == '__main__':\n    train()\n"
    )
    (folder / "train.py").write_text("from placed.job import train\ntrain()\n")
    monkeypatch.syspath_prepend(str(folder / "src"))
    train = {"function": "placed.job:train", "module": "-m placed.job", "script": "train.py"}[kind]
    try:
        assert launcher.options(num_processes=1).run(train) == ["submitted", "data"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "placed"]:
            del sys.modules[name]


def test_annotations_of_a_script_are_what_python_makes_of_them(launcher: Launcher, folder: Path) -> None:
    (folder / "train.py").write_text(
        "import dataclasses\nimport rankzero.train as rt\n"
        "@dataclasses.dataclass\nclass Config:\n    amp: bool = False\n"
        "rt.set_result(dataclasses.fields(Config)[0].type is bool)\n"
    )
    assert launcher.options(num_processes=1).run(folder / "train.py") is True


def test_scripts_of_one_process_ship_the_modules_beside_them(tmp_path: Path) -> None:
    """Threads of a service launch scripts whose modules have equal names."""
    folders = [tmp_path / str(number) for number in range(8)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "train.py").write_text("import shared_name\nimport package_name.inner\n")
        (folder / "shared_name.py").write_text(f"OWNER = {number}\n")
        (folder / "package_name").mkdir()
        (folder / "package_name" / "__init__.py").write_text("")
        (folder / "package_name" / "inner.py").write_text(f"OWNER = {number}\n")
    path = list(sys.path)
    changed: list[list[str]] = []

    def launch(folder: Path) -> tuple[Payload, dict[str, str]]:
        script = str(folder / "train.py")
        made = build(script, (), {}), identity_of(script, (), {}, 1)
        if sys.path != path:
            changed.append(list(sys.path))
        return made

    with ThreadPoolExecutor(len(folders)) as pool:
        made = list(pool.map(launch, folders * 16))
    assert changed == [], "functions of other threads find their modules there"
    for number, (one, _) in enumerate(made):
        assert one.modules.zipped
        with zipfile.ZipFile(io.BytesIO(one.modules.zipped)) as archive:
            sources = {
                archive.read(name) for name in archive.namelist() if name.endswith(("shared_name.py", "inner.py"))
            }
        assert sources == {f"OWNER = {number % len(folders)}\n".encode()}
    assert len({str(sorted(identity.items())) for _, identity in made}) == len(folders)


NEVER_CALLED = """
def train():
    import rankzero.train as rt
    rt.report({"loss": 1.0})

if __name__ == "main":
    train()
"""


@pytest.mark.parametrize("kind", ["script", "module"])
@pytest.mark.parametrize(
    ("last", "is_said"),
    [
        ("", True),
        ("import sys; sys.exit(0)", True),
        ("train()", False),
        ("import rankzero.train as rt; rt.set_result(0)", False),
        ("import rankzero.train as rt; rt.barrier()", False),
        (
            "import torch.distributed as dist; dist.init_process_group('gloo', init_method='env://'); "
            "dist.destroy_process_group()",
            False,
        ),
    ],
)
def test_a_program_in_which_nothing_happened_says_so_once(
    launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, last: str, is_said: bool
) -> None:
    (folder / "nothing_here.py").write_text(NEVER_CALLED + last)
    monkeypatch.syspath_prepend(str(folder))
    handle = launcher.submit("-m nothing_here" if kind == "module" else folder / "nothing_here.py")
    handle.wait(60)
    lines = [line for rank in (0, 1) for line in handle.logs(rank) if "rankzero: " in line and "waiting" not in line]
    said = f"rankzero: the {kind} made no process group, reported nothing and set no result: is its training function "
    assert [line.partition("rankzero: ")[1] for line in lines if said in line] == ["rankzero: "] * is_said
