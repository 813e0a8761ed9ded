"""Interfaces and addresses of this machine, real ones: also in a network namespace made for the test."""

import inspect
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from rankzero.host import network
from rankzero.host.network import first_reachable, socket_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are listed as Linux does")

BOUND = 1.0
MARGIN = 20.0  # Seconds that a machine under load may take longer: less than what hangs here would
LONG = 60.0
BLACK_HOLE = "10.77.0.77"

IN_NAMESPACE = """
ip link set lo up
ip link add wire0 type veth peer name wire1
ip addr add 10.77.0.1/24 dev wire0
ip addr add 10.77.0.5/24 dev wire0
ip addr add 10.77.2.1 peer 10.77.2.2 dev wire1
ip addr add fd77::1/64 dev wire0 nodad
ip link set wire0 up
ip link set wire1 up
# Packets to this address leave and nobody answers, not even the ARP request.
ip neigh replace 10.77.0.77 lladdr 02:00:00:00:00:77 dev wire0 nud permanent
exec "$@"
"""


def interface_of(host: str) -> str | None:
    """The interface that NCCL is told to use for an address, None if it is told nothing."""
    return socket_environment(host).get("NCCL_SOCKET_IFNAME", "").removeprefix("=") or None


def in_namespace(expression: str) -> object:
    """The value of an expression over `network`, evaluated where `IN_NAMESPACE` has set up interfaces."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("network namespaces need root, ip and unshare")
    program = (
        f"import json, time, socket\nfrom rankzero.host.network import *\n{inspect.getsource(interface_of)}"
        f"started = time.monotonic()\nprint(json.dumps([{expression}, time.monotonic() - started]))"
    )
    command = ["unshare", "--net", "sh", "-ec", IN_NAMESPACE, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode and "ermitted" in done.stderr:
        pytest.skip(f"network namespaces are not permitted: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    value, seconds = json.loads(done.stdout)
    assert seconds < BOUND + MARGIN
    return value


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "[::1]"])
def test_loopback_is_lo(host: str) -> None:
    if ":" in host and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    assert socket_environment(host) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize(
    ("written", "host"),
    [("[::1]", "::1"), ("[fe80::1%eth0]", "fe80::1%eth0"), ("a.b", "a.b"), ("::1", "::1"), ("", "")],
)
def test_brackets_are_no_part_of_an_address(written: str, host: str) -> None:
    assert network.without_brackets(written) == host
    assert network.is_loopback(written) == network.is_loopback(host)


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77", "0.0.0.0", "no-such-host.invalid", "a" * 300])
def test_what_is_not_here_has_no_interface(host: str) -> None:
    assert socket_environment(host) == {}


@pytest.mark.parametrize(
    ("host", "interface"),
    [
        ("10.77.0.1", "wire0"),
        ("fd77::1", "wire0"),
        ("10.77.2.1", "wire1"),
        ("10.77.2.2", None),
        ("10.77.0.9", None),
    ],
)
def test_the_address_of_an_interface_is_known(host: str, interface: str | None) -> None:
    assert in_namespace(f"interface_of({host!r})") == interface


def test_the_first_host_that_accepts_where_the_order_is_a_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert first_reachable(["no-such-host.invalid", "localhost"], port, LONG) == "localhost"
        assert first_reachable([], port, LONG) is None
        monkeypatch.setenv("RANKZERO_TIME_SCALE", "40")
        hosts = [f"127.0.0.{number}" for number in range(1, 6)]
        assert first_reachable(hosts, port, 20 * LONG) == "127.0.0.1"
        assert first_reachable(hosts[::-1], port, 20 * LONG) == "127.0.0.5"


def test_a_black_hole_does_not_hide_the_host_after_it() -> None:
    hosts = f"[{BLACK_HOLE!r}, '10.77.0.5']"
    listening = "(lambda server: first_reachable({}, server.getsockname()[1], {}))(socket.create_server(('', 0)))"
    assert in_namespace(listening.format(hosts, MARGIN / 2)) == "10.77.0.5"
