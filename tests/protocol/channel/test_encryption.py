"""Encrypted connections: who listens on the wire reads nothing, who has another certificate is not the driver."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.protocol.channel.conftest import proxied, serving, until

from rankzero import EngineError, InvalidJobError, Launcher
from rankzero.channel.connection import ChannelError
from rankzero.channel.messages import Log
from rankzero.channel.tls import make_identity

WORDS = b"what nobody on the wire may read"


@pytest.mark.parametrize("encrypt", [True, False])
def test_who_listens_reads_nothing_of_an_encrypted_connection(tmp_path: Path, encrypt: bool) -> None:
    async def main() -> bytes:
        async with serving(tmp_path, encrypt=encrypt) as served, proxied(served) as (proxy, port):
            served.offered.write_bytes(WORDS * 20_000)
            agent = await served.agent(driver=served.driver(port=port))
            agent.connection.send(Log([WORDS.decode()]), 0)
            await agent.driver.fetch("payload", str(tmp_path / "fetched"))
            await agent.driver.put("0-value", str(served.offered))
            await until(lambda: served.received.messages == [(0, 0, Log([WORDS.decode()]))])
            assert (tmp_path / "fetched").read_bytes() == (tmp_path / ".upload-0-value").read_bytes() == WORDS * 20_000
            return bytes(proxy.seen)

    seen = asyncio.run(main())
    assert len(seen) > len(WORDS) * 40_000
    found = [word for word in (WORDS, b"AGENT", b"GET payload", b'["Log",') if word in seen]
    assert bool(found) is not encrypt


def test_another_certificate_is_not_the_drivers(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, encrypt=True) as served:
            wrong = replace(served.driver(), certificate=make_identity()[0])
            with pytest.raises(ChannelError, match="has another certificate than the run's"):
                await wrong.find(0, 0.1)
            with pytest.raises(ChannelError, match="no driver was found"):
                await replace(served.driver(), certificate=None).find(0, 0.1)
            assert served.received.messages == []

    asyncio.run(main())


def test_a_run_encrypts_where_it_is_asked_to(launcher: Launcher) -> None:
    assert launcher.options(encrypt=True).run(lambda: "value") == "value"


def test_without_openssl_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match="encrypt needs the openssl command"):
        launcher.options(encrypt=True, num_processes=1).run(len, "abc")


def test_encrypt_is_a_flag() -> None:
    with pytest.raises(InvalidJobError, match="encrypt is 'yes'"):
        Launcher(2, encrypt="yes")  # type: ignore[arg-type]
