"""Whoever does not prove the secret has no effect, whatever they send, and agents are served meanwhile."""

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.protocol.channel.conftest import Serving, proxied, serving, until

from rankzero.channel.connection import ChannelError
from rankzero.channel.messages import Beat, MessageError


async def answer(served: Serving, data: bytes) -> bytes:
    """Sends bytes like a stranger, and returns everything that the driver sends before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                return await reader.read()
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64), b"\xff" * 64, bytes(64) + b"AGENT 0\n", b"AGENT 0\n" * 1000],
)
def test_a_stranger_gets_a_random_number_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            assert len(await answer(served, garbage)) <= 32
            assert served.received.messages == []
            assert (await served.agent()).ended is None

    asyncio.run(main())


def test_one_who_sends_nothing_is_dropped_in_time(tmp_path: Path, limits: Callable[..., None]) -> None:
    limits(handshake=0.5)

    async def main() -> None:
        async with serving(tmp_path) as served:
            assert len(await answer(served, b"")) == 32
            assert len(await answer(served, b"x" * 63)) == 32

    asyncio.run(main())


def test_a_recorded_connection_proves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, proxied(served) as (proxy, port):
            agent = await served.agent(driver=served.driver(port=port))
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages)
            assert len(await answer(served, bytes(proxy.seen))) == 32
            assert len(await answer(served, bytes(proxy.seen[32:]))) == 32
            assert len(served.received.messages) == 1

    asyncio.run(main())


def test_a_wrong_secret_finds_no_driver(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            with pytest.raises(
                ChannelError, match="no driver was found on port .*: 127.0.0.1: the connection was closed"
            ):
                await served.driver(secret="11" * 32).find(1, 0.3)
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages == [(0, 0, Beat(1))])

    asyncio.run(main())


@pytest.mark.parametrize("request_line", ["AGENT x", "DELETE payload", "AGENT 1\nno message", "PUT a b", ""])
def test_an_agent_that_breaks_the_rules_is_dropped_and_the_others_are_served(tmp_path: Path, request_line: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            other = await served.driver()._connect("127.0.0.1", request_line)
            async with asyncio.timeout(60):
                with contextlib.suppress(OSError, MessageError):
                    while await other.read_line(60.0):
                        pass
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages)
            assert served.received.messages == [(0, 0, Beat(1))]

    asyncio.run(main())


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_shower_of_garbage_has_no_effect(tmp_path: Path, encrypt: bool) -> None:
    async def main() -> None:
        chance = random.Random(1)
        # Of a record of TLS's handshake, so that some of it is read.
        begin = b"\x16\x03\x01" if encrypt else b""
        async with serving(tmp_path, encrypt=encrypt) as served:
            agent = await served.agent()
            sent = 0
            while sent < 1_000_000:
                pieces = [begin + chance.randbytes(chance.randrange(1, 5000)) for _ in range(50)]
                sent += sum(map(len, pieces))
                await asyncio.gather(
                    *(answer(served, piece if len(piece) > 64 else piece + bytes(64)) for piece in pieces)
                )
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages == [(0, 0, Beat(1))])
            assert len(served.server._connections) == 1

    asyncio.run(main())


def test_agents_that_come_all_at_once_are_all_served_beside_idle_strangers(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(handshake=60.0)

    async def main() -> None:
        async with serving(tmp_path) as served:
            idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(100)]
            agents = await asyncio.gather(*(served.agent(task) for task in range(100)))
            for agent in agents:
                agent.connection.send(Beat(1), 0)
            await until(lambda: len(served.received.messages) == 100)
            assert sorted(task for task, *_ in served.received.messages) == [*range(100)]
            for stranger in idle:
                stranger.close()

    asyncio.run(main())


# -- the agent's side ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, bytes(64) + b"{}\n"]
)
def test_a_stranger_who_answers_is_skipped(tmp_path: Path, reply: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:

            async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(reply)
                writer.write_eof()

            strange = await asyncio.start_server(serve, "127.0.0.2", served.port)
            agent = await served.agent(driver=served.driver("127.0.0.2", "127.0.0.1"))
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages)
            assert served.received.messages == [(0, 0, Beat(1))]
            strange.close()

    asyncio.run(main())


def test_closed_ports_and_names_that_do_not_resolve_are_skipped_and_named(tmp_path: Path) -> None:
    hosts = ["127.0.0.3", "no-such-host.invalid", "not a name..", "x" * 300]

    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.agent(driver=served.driver(*hosts, "127.0.0.1"))
            with pytest.raises(ChannelError, match=r"no driver was found on port 1 .*127.0.0.3: .*; no-such-host"):
                await served.driver(*hosts[:2], port=1).find(1, 0.1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bind", "host"), [("localhost", "localhost"), ("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")]
)
def test_names_and_both_families_of_addresses(tmp_path: Path, bind: str, host: str) -> None:
    if ":" in bind and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")

    async def main() -> None:
        async with serving(tmp_path, bind) as served:
            await served.agent(driver=served.driver(host))
            assert served.server.agents.keys() == {0}

    asyncio.run(main())
