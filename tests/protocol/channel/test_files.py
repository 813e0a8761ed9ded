"""Files in both directions, each on a connection of its own."""

import asyncio
import io
import os
import threading
from pathlib import Path

import pytest
from tests.protocol.channel.conftest import serving, until

from rankzero import store
from rankzero.channel.connection import ChannelError
from rankzero.channel.messages import Beat


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "missing: FileNotFoundError"),
        ("other", "no such file is offered"),
        ("../x", "no such"),
        ("long", "^/long/long"),
    ],
)
def test_a_file_that_cannot_be_had_is_refused_with_the_reason(tmp_path: Path, name: str, why: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            with pytest.raises(ChannelError, match=why):
                await agent.driver.fetch(name, str(tmp_path / "here"))
            assert not list(tmp_path.glob("here*"))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "../escape", "a/b", ".hidden", "nul\0"])
def test_an_upload_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        inside = tmp_path / "inside"
        inside.mkdir()
        async with serving(inside) as served:
            agent = await served.agent()
            with pytest.raises(OSError, match="closed"):
                await agent.driver.put(name, str(served.offered))
            assert {path.name for path in tmp_path.rglob("*")} == {"inside", "offered"}

    asyncio.run(main())


def test_a_full_disk_is_an_error_of_the_file_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            arrived = str(tmp_path / ".upload-0-value")
            os.symlink("/dev/full", arrived)
            # The connection may break before the reason arrives.
            with pytest.raises(OSError):
                await agent.driver.put("0-value", str(served.offered))
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages)

    asyncio.run(main())


def test_a_file_that_ends_too_early_does_not_arrive(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            sender = await agent.driver._connect("127.0.0.1", "PUT 0-value 100")
            await sender.answer(5.0)
            with pytest.raises(OSError, match="changed while it was read"):
                await sender.send_file(io.BytesIO(b"x" * 50), 100)
            arrived = tmp_path / ".upload-0-value"
            await until(arrived.exists)
            sender.close()
            await until(lambda: not arrived.exists())

    asyncio.run(main())


def test_a_store_that_hangs_stalls_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(store, "size", lambda location: hangs.wait(30) and 0)

    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            fetching = asyncio.create_task(agent.driver.fetch("payload", str(tmp_path / "here")))
            await asyncio.sleep(0.2)
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages)
            assert not fetching.done()
            fetching.cancel()

    asyncio.run(main())
    hangs.set()
