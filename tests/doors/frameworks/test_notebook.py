"""A run in a real kernel: its card and its lines come while it lives, and an interrupt of the kernel cancels it."""

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from tests.conftest import until

from rankzero import RunHandle

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

TIMEOUT = 120.0
TRAINING = """
    from rankzero import Launcher, RunHandle

    def train(steps, pause, told=None):
        import os
        import threading
        import rankzero.train as rt
        for step in range(steps):
            while step == 10 and told and not os.path.exists(told):
                threading.Event().wait(0.05)
            rt.report({"step": step, "total_steps": steps, "loss": 1 / (step + 1)})
            print("at", step, flush=True)
            threading.Event().wait(pause)
        return 0.5
"""


class Kernel:
    """A kernel, and what its cells have put out."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self._client = client
        self.messages: list[dict[str, Any]] = []

    def start(self, code: str) -> str:
        return str(self._client.execute(textwrap.dedent(code)))

    def read(self) -> None:
        try:
            while True:
                self.messages.append(self._client.get_iopub_msg(timeout=0.1))
        except Empty:
            return

    def contents(self, kind: str) -> list[dict[str, Any]]:
        return [one["content"] for one in self.messages if one["msg_type"] == kind]

    def cards(self) -> list[str]:
        shown = [
            *self.contents("display_data"),
            *self.contents("update_display_data"),
            *self.contents("execute_result"),
        ]
        return [one["data"]["text/html"] for one in shown if "text/html" in one["data"]]

    def await_that(self, look: Callable[[], Any], what: str) -> None:
        def there() -> bool:
            self.read()
            return bool(look())

        until(there, TIMEOUT, what)

    def run(self, code: str) -> None:
        before = len(self.messages)
        self.finish(self.start(code), before)

    def finish(self, asked: str, before: int = 0) -> None:
        def is_idle() -> bool:
            return any(
                one["msg_type"] == "status"
                and one["content"]["execution_state"] == "idle"
                and one["parent_header"].get("msg_id") == asked
                for one in self.messages[before:]
            )

        self.await_that(is_idle, "the end of the cell")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(env=dict(os.environ))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT)
        started = Kernel(manager, client)
        started.run(TRAINING)
        yield started
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_cell_shows_a_card_and_the_lines_while_the_run_lives(kernel: Kernel, tmp_path: Path) -> None:
    kernel.messages.clear()
    told = tmp_path / "told"
    asked = kernel.start(f"Launcher(1, store={str(tmp_path)!r}, run_id='shown').run(train, 30, 0.1, {str(told)!r})")
    kernel.await_that(
        lambda: any(">running<" in card and " of 30 steps" in card for card in kernel.cards()), "a card of the run"
    )
    told.touch()
    kernel.finish(asked)
    assert ">succeeded<" in kernel.cards()[-1]
    lines = [line for one in kernel.contents("stream") for line in one["text"].splitlines()]
    assert [line for line in lines if line.startswith("[0]")] == [f"[0] at {step}" for step in range(30)]
    assert kernel.contents("execute_result")[-1]["data"]["text/plain"] == "0.5"
    assert not any("<script" in card for card in kernel.cards())


def test_an_interrupt_of_the_kernel_cancels_the_run(kernel: Kernel, tmp_path: Path) -> None:
    kernel.messages.clear()
    kernel.start(f"Launcher(2, store={str(tmp_path)!r}, run_id='endless').run(train, 100_000, 0.1)")
    kernel.await_that(lambda: any("at 3" in one["text"] for one in kernel.contents("stream")), "lines of the ranks")
    kernel.manager.interrupt_kernel()
    kernel.await_that(lambda: kernel.contents("error"), "the interrupt")
    assert kernel.contents("error")[0]["ename"] == "KeyboardInterrupt"
    assert RunHandle.attach(tmp_path / "endless").status().state == "cancelled"
    kernel.await_that(lambda: "cancelled" in kernel.cards()[-1], "the last state of the card")
