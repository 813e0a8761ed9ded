"""Notices of a run reach a function and a real webhook: what has happened, once, also after a webhook was away."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until

from rankzero import InvalidJobError, Launcher, WorkerFailedError
from rankzero.tracking import Notice, Notify


class Hook(http.server.ThreadingHTTPServer):
    """A webhook that refuses the first post."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.texts: list[str] = []
        self.refused = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.refused:
            self.server.refused += 1
            self.send_error(503)
            return
        self.server.texts.append(body["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def train(folder: str) -> None:
    import os
    import signal
    import time

    import rankzero.train as rt

    context = rt.get_context()
    rt.report({"loss": 1.0})
    if context.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    # Somebody waits until the silence was noticed.
    deadline = time.monotonic() + 120
    while not os.path.exists(f"{folder}/heard") and time.monotonic() < deadline:
        time.sleep(0.05)
    raise ValueError("no luck\nsecond line")


def test_a_restart_a_standstill_and_the_first_cause_are_told_once(hook: Hook, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def note(notice: Notice) -> None:
        with open(notes, "a") as file:
            file.write(f"{notice.kind} {notice.run_id} {notice.labels} {notice.reason}\n")
        if notice.kind == "no-progress":
            (tmp_path / "heard").touch()

    trackers = [Notify(note, no_progress=2.0), Notify(hook.address)]
    launcher = Launcher(
        1, store=tmp_path / "store", run_id="paged", max_restarts=1, labels={"team": "a"}, trackers=trackers
    )
    with pytest.raises(WorkerFailedError):
        launcher.run(train, str(tmp_path))
    told = notes.read_text().splitlines()
    assert [line.split()[0] for line in told if not line.startswith("no-progress")] == ["restart", "failed"]
    assert any(line.startswith("no-progress paged {'team': 'a'} nothing was reported for") for line in told)
    assert told[-1].endswith("ValueError: no luck")
    # The first post was refused; it came again.
    assert hook.refused == 1
    restart, failed = hook.texts
    assert restart.startswith("run paged is restarted: ")
    assert failed.startswith("run paged failed: rank 0 on ")
    assert str(tmp_path / "store" / "paged") in failed


def test_only_what_was_asked_for_is_told(hook: Hook, tmp_path: Path) -> None:
    hook.refused = 1
    launcher = Launcher(1, store=tmp_path, run_id="quiet", trackers=[Notify(hook.address, on=["succeeded"])])
    launcher.run(int, "3")
    until(lambda: hook.texts, 30, "the notice")
    assert hook.texts == [f"run quiet succeeded ({tmp_path}/quiet)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "slack"}, "give a function, or the address of a webhook"),
        ({"to": print, "on": ["boom"]}, "give some of no-progress, restart"),
        ({"to": print, "on": "failed"}, "give some of no-progress, restart"),
        ({"to": print, "no_progress": 0}, "must be a positive number of seconds"),
    ],
)
def test_what_cannot_be_told_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        Notify(**arguments)
