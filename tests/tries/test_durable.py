"""What a pipeline step does about the run that an earlier try has left: who comes decides what counts."""

import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import find, until
from tests.tries.identities import identity_by

from rankzero import InvalidJobError, Launcher, RunCancelledError, RunHandle, WorkerFailedError
from rankzero.pipeline import open_run

LOG = logging.getLogger(__name__)


@dataclass
class Try:
    """One try of a step, of a chain that an orchestrator starts by itself."""

    generation: str
    retrier: int | None = None
    is_followed_by_another = True
    lease_when_attached = None

    def detaches(self, error: BaseException) -> bool:
        return True

    def has_accepted(self, receiver: Mapping[str, Any]) -> bool:
        return False

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        return False


class Interrupted(Exception):
    """Ends a try whose run goes on."""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / f"helper_{secrets.token_hex(4)}.py"
    path.write_text("RATE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


@pytest.fixture
def script(tmp_path: Path, helper: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        f"import sys, time\nfrom pathlib import Path\nimport rankzero.train as rt\nfrom {helper.stem} import RATE\n"
        "Path(sys.argv[1] + '-awaited').touch()\n"
        "while not Path(sys.argv[1]).exists():\n    time.sleep(0.02)\nrt.set_result(RATE)\n"
    )
    return path


@pytest.fixture
def durable(launcher: Launcher, tmp_path: Path) -> Iterator[Launcher]:
    launcher = launcher.options(num_processes=1, run_id="one", orphan_timeout=60.0)
    yield launcher
    if handle := find(launcher):
        handle.cancel()
        handle.wait(60)


def edit(path: Path, text: str) -> None:
    # Python takes a compiled module for current by its size and its time in seconds.
    path.write_text(f"{text}# edited\n")
    moment = time.time_ns()
    os.utime(path, ns=(moment, moment))


def leave(
    launcher: Launcher,
    script: Path,
    args: tuple[Any, ...],
    generation: str,
    retrier: int | None = None,
) -> RunHandle[Any]:
    with (
        pytest.raises(Interrupted),
        open_run(launcher, str(script), args, {}, Try(generation, retrier), LOG) as handle,
    ):
        raise Interrupted
    return handle


def test_a_run_to_which_no_try_can_come_back_is_not_left_to_its_lease(
    durable: Launcher, script: Path, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as retrier:
        arguments = (str(tmp_path / "end"),)
        left = leave(durable.options(orphan_timeout=8.0), script, arguments, "scheduled", retrier.pid)
        retrier.kill()
    until(lambda: left.own.status().final, 60, "the end of the run")
    with pytest.raises(RunCancelledError, match=r"would have retried the step has exited, .* for 6.0 s"):
        left.result()


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 50, b"[]"], ids=["empty", "cut", "zeros", "list"])
def test_a_run_with_an_unreadable_job_is_not_replaced(launcher: Launcher, content: bytes) -> None:
    launcher = launcher.options(num_processes=1, run_id="one")
    handle = launcher.submit(print)
    handle.wait(60)
    path = Path(handle.own.run.job_path(0))
    job = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(InvalidJobError, match="not replaced"):
        launcher.submit(print)
    path.write_bytes(job)
    assert RunHandle.attach(handle.directory).status().state == "succeeded"


def count_starts() -> int:
    """Returns how often the training was started from its checkpoint."""
    import rankzero.train as rt

    checkpoint = rt.get_checkpoint()
    starts = checkpoint.load()["starts"] + 1 if checkpoint else 0
    rt.report({}, checkpoint={"starts": starts})
    return int(starts)


class Repeated(Try):
    """A try by which an orchestrator, and not a user, repeats a step that had succeeded."""

    def repeats(self, receiver: Mapping[str, Any]) -> bool:
        return True


def test_a_repeated_step_resumes_if_its_delivered_result_was_deleted(
    durable: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    with open_run(durable, count_starts, (), {}, Try("scheduled"), LOG) as handle:
        assert handle.result(60) == 0
        handle.offer({"step": "train"})
    with open_run(durable, count_starts, (), {}, Try("cleared"), LOG) as handle:
        assert handle.attached, "the orchestrator has not stored it"
        handle.acknowledge()
    with open_run(durable, count_starts, (), {}, Repeated("scheduled"), LOG) as handle:
        assert handle.attached
        assert handle.result(60) == 0
    shutil.rmtree(handle.own.path("result"))
    with open_run(durable, count_starts, (), {}, Repeated("scheduled"), LOG) as handle:
        assert not handle.attached
        assert handle.result(60) == 1
    assert "was deleted, so it resumes from its last checkpoint" in caplog.text


@pytest.fixture
def counting(durable: Launcher, tmp_path: Path) -> tuple[Launcher, Path, Path]:
    """A launcher with a dataset of 10 rows, the script that returns their number, and the folder of the dataset."""
    data = tmp_path / "data"
    data.mkdir()
    append(data, "a", 10)
    path = tmp_path / "count.py"
    path.write_text(
        "import sys, time\nfrom pathlib import Path\nimport rankzero.train as rt\n"
        "first = rt.get_checkpoint() is None\n"
        "rt.report({}, checkpoint={'step': 1})\nrt.context.await_checkpoint()\nPath(sys.argv[1] + '-awaited').touch()\n"
        "while not Path(sys.argv[1]).exists():\n    time.sleep(0.02)\n"
        "if first and Path(sys.argv[1]).read_text():\n    sys.exit(3)\n"
        "rt.set_result([rt.get_dataset_shard().num_rows, first])\n"
    )
    return durable.options(dataset=str(data)), path, data


def append(data: Path, name: str, rows: int) -> None:
    pq.write_table(pa.table({"id": list(range(rows))}), data / f"{name}.parquet")


def test_rows_that_are_appended_between_two_tries_end_no_training(
    counting: tuple[Launcher, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher, script, data = counting
    end = str(tmp_path / "end")
    leave(launcher, script, (end,), "scheduled")
    until(Path(f"{end}-awaited").exists, 60, "a training that has opened its dataset")
    append(data, "b", 5)
    # The job that writes the table may have deleted it for a moment.
    aside = data.rename(tmp_path / "aside")
    with open_run(launcher, str(script), (end,), {}, Try("scheduled"), LOG) as handle:
        assert handle.attached
        aside.rename(data)
        Path(end).touch()
        assert handle.result(60) == [10, True]
    # A user who runs it again wants the new rows.
    with open_run(launcher, str(script), (end,), {}, Try("cleared"), LOG) as handle:
        assert handle.result(60) == [15, True]


def test_a_try_of_a_training_that_failed_begins_again_with_rows_that_were_appended(
    counting: tuple[Launcher, Path, Path], tmp_path: Path
) -> None:
    launcher, script, data = counting
    end = tmp_path / "end"
    end.write_text("fail")
    leave(launcher, script, (str(end),), "scheduled").wait(60)
    append(data, "b", 5)
    end.write_text("")
    with open_run(launcher, str(script), (str(end),), {}, Try("scheduled"), LOG) as handle:
        assert handle.result(60) == [15, True]


def test_the_identity_is_that_of_the_code_that_is_sent(
    launcher: Launcher, tmp_path: Path, script: Path, helper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may compute a dataset for minutes, and the user goes on with the next version meanwhile."""
    rows, go = tmp_path / "rows.parquet", tmp_path / "go"
    pq.write_table(pa.table({"x": [1, 2]}), rows)
    go.touch()
    launcher = launcher.options(num_processes=1, dataset=str(rows), run_id="one")
    sent = identity_by(launcher, script, (str(go),), {})
    read = pq.ParquetFile

    def read_for_long(*args: Any, **kwargs: Any) -> Any:
        edit(helper, "RATE = 2\n")
        return read(*args, **kwargs)

    monkeypatch.setattr(pq, "ParquetFile", read_for_long)
    handle = launcher.submit(script, str(go))
    assert handle.result(60) == 1
    assert handle.job.identity_parts == sent
    monkeypatch.undo()
    assert identity_by(launcher, script, (str(go),), {}) != sent


def test_a_file_that_did_not_travel_counts_once_a_rank_has_loaded_it(launcher: Launcher, tmp_path: Path) -> None:
    def train(folder: str, name: str) -> None:
        import importlib

        import rankzero.train as rt

        sys.path.insert(0, folder)
        importlib.import_module(name)
        rt.report({}, checkpoint={"x": 1})
        rt.context.await_checkpoint()
        raise ValueError("late")

    one = launcher.options(run_id="one", num_processes=1)
    plugin = tmp_path / f"plugin_{secrets.token_hex(4)}.py"
    for text, beginning in [("A = 1", "first"), ("A = 1", "resumed"), ("A = 2", f"other than before: module {plugin}")]:
        plugin.write_text(text)
        with pytest.raises(WorkerFailedError, match="late"):
            one.run(train, str(tmp_path), plugin.stem)
        assert beginning in RunHandle.attach(tmp_path / "store" / "one").job.beginning
