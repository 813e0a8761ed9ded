"""An agent's connection: messages in both directions, its ends, and what a cut of the network does to it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.protocol.channel.conftest import PING, SILENCE, proxied, serving, until

from rankzero.channel.connection import ChannelError
from rankzero.channel.messages import Beat, Bye, Log, Message


def test_an_agent_that_says_goodbye_has_delivered_everything(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            for number in range(100):
                agent.connection.send(Log([f"{number}" * 10_000]), 0)
            agent.connection.send(Bye())
            await until(lambda: agent.ended)
            assert len(served.received.messages) == 100
            assert served.received.ended == {0: None}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "abort"])
def test_an_agent_that_dies_is_lost_with_the_reason(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            agent.connection.close() if how == "close" else agent.connection.abort("")
            await until(lambda: served.received.ended)
            assert served.received.ended[0]
            assert not served.server.agents

    asyncio.run(main())


def test_a_second_agent_of_one_task_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            with pytest.raises(ChannelError, match="another agent serves this task"):
                await served.driver().find(0, 5.0)
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.messages == [(0, 0, Beat(1))])

    asyncio.run(main())


def test_the_driver_is_found_behind_an_address_that_drops_packets(
    tmp_path: Path, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(handshake=1.0)

    async def main() -> None:
        async with serving(tmp_path) as served:
            full.bind(("127.0.0.9", served.port))
            full.listen(0)
            for client in clients:
                client.setblocking(False)
                client.connect_ex(full.getsockname())
            found = [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, served.port)) for host in ("127.0.0.9", "127.0.0.1")
            ]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
            await served.agent(driver=served.driver("driver"))
            assert served.server.agents.keys() == {0}
            assert asyncio.get_running_loop()._default_executor is None

    with contextlib.ExitStack() as stack:
        # A full backlog drops what else arrives.
        full, *clients = (stack.enter_context(socket.socket()) for _ in range(4))
        asyncio.run(main())


def test_silence_that_lasts_is_the_end_for_both(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, proxied(served) as (proxy, port):
            agent = await served.agent(driver=served.driver(port=port))
            proxy.deafen()
            await until(lambda: agent.ended and served.received.ended)
            assert "nothing was received from the driver for 2 s" in agent.ended
            assert "nothing was received from it for 2 s" in served.received.ended[0]

    asyncio.run(main())


def test_an_agent_waits_for_a_silent_driver_whose_process_lives(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, proxied(served) as (proxy, port):
            lives = True

            def driver_lives() -> bool:
                return lives

            agent = await served.agent(driver=served.driver(port=port), lives=driver_lives)
            proxy.deafen()
            for _ in range(round(2 * SILENCE / PING)):
                await asyncio.sleep(PING)
                # The driver is the one that is silent.
                served.server.agents[0].received_at = time.monotonic()
            assert agent.ended is None
            lives = False
            await until(lambda: agent.ended)

    asyncio.run(main())


def test_a_driver_that_stood_still_loses_no_agent(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agent = await served.agent()
            # Both ends are in this process, and neither reads or writes meanwhile.
            time.sleep(2 * SILENCE)
            for _ in range(10):
                await asyncio.sleep(PING)
            assert agent.ended is None
            assert served.received.ended == {}

    asyncio.run(main())


def test_an_agent_on_whose_message_the_driver_fails_is_lost_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:

            def on_message(task: int, local_rank: int | None, message: Message) -> None:
                raise RuntimeError("a fault of the driver")

            served.received.on_message = on_message
            agent = await served.agent()
            agent.connection.send(Beat(1), 0)
            await until(lambda: served.received.ended and agent.ended)
            assert "a fault of the driver" in served.received.ended[0]

    asyncio.run(main())


def test_what_agents_sent_before_they_ended_is_read_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            agents = [await served.agent(task) for task in range(8)]
            for agent in agents:
                for number in range(1000):
                    agent.connection.send(Beat(number), 0)
                agent.connection.close()
            await until(lambda: not any(agent.connection.unsent for agent in agents))
            await served.server.read_rest()
            assert len(served.received.messages) == 8000
            assert sorted(served.received.ended) == list(range(8))

    asyncio.run(main())
