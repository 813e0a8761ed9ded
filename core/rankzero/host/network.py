"""Listens on this host, and finds the interface of an address of it, and the first reachable one of several addresses.

Standard library only: this module is shipped to executors.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rankzero import bounds

CONNECT_HEAD_START = bounds.scaled(0.25)  # By which a host is tried before the next one: earlier ones are preferred

_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# netdevice(7)
_SIOCGIFCONF = 0x8912
_IFCONF = struct.Struct("iP")
_IFREQ = struct.Struct("16s4x4s16x")
_IFCONF_SIZE = 1 << 16


class _Assigned(NamedTuple):
    """An address of this host. ``label`` is its interface's name as C's ``getifaddrs`` returns it: ``eth0:1``."""

    address: _IPAddress
    label: str

    @property
    def interface(self) -> str:
        return self.label.partition(":")[0]


def socket_environment(host: str) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL use the interface of an address of this machine.

    Without them gloo uses what the host name resolves to, which may be a loopback address, and
    NCCL the first interface of its own order.

    Args:
        host: The name or address under which the other hosts reach this one.

    Returns:
        ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``; empty if the interface is not known.
    """
    found = _find(host)
    if found is None:
        return {}
    name, label = found
    # NCCL: with "=" the name must be equal, without it the value is a prefix. Both libraries
    # list labels ("eth0:1"), but NCCL parses the text after a colon as a port.
    return {"GLOO_SOCKET_IFNAME": label, "NCCL_SOCKET_IFNAME": f"={name}" if label == name else name}


def without_brackets(host: str) -> str:
    """Returns a host as resolvers accept it, since Spark writes an IPv6 address in brackets: ``[::1]``."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def addresses_of(host: str) -> list[str]:
    """Resolves a host's name to its addresses; returns the host itself if it is an address or cannot be resolved."""
    try:
        infos = socket.getaddrinfo(without_brackets(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [host]
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def own_addresses() -> list[str]:
    """Returns this host's addresses, without loopback and link-local ones, as far as the kernel lists them."""
    if not sys.platform.startswith("linux"):
        return addresses_of(socket.gethostname())
    try:
        found = [assigned.address for assigned in _assigned()]
    except OSError:
        return addresses_of(socket.gethostname())
    return [str(address) for address in found if not (address.is_loopback or address.is_link_local)]


def bind_address(host: str) -> str:
    """Returns the address to bind for a server under a name of this machine: all addresses, or only loopback."""
    if is_loopback(host):
        return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Returns True for a loopback address or name, which means another machine on each host."""
    host = without_brackets(host)
    return host.startswith("127.") or host in ("::1", "localhost")


def first_reachable(hosts: Sequence[str], port: int, timeout: float) -> str | None:
    """Returns the first of several hosts that accepts a TCP connection, which is closed immediately.

    Args:
        hosts: Names or addresses, the preferred one first. Each is tried shortly before the next.
        port: The TCP port.
        timeout: Seconds for all together, including name resolution, even when that hangs.

    Returns:
        The entry of ``hosts``, or None if none accepted in time.
    """
    deadline = time.monotonic() + timeout
    head_start = min(CONNECT_HEAD_START(), timeout / (2 * len(hosts))) if hosts else 0.0
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def attempt(host: str) -> None:
        answers.put(host if _accepts(host, port, deadline) else None)

    waiting = list(reversed(hosts))
    running = 0
    while waiting or running:
        if waiting:
            threading.Thread(target=attempt, args=(waiting.pop(),), name="rankzero-reach", daemon=True).start()
            running += 1
        try:
            answer = answers.get(timeout=head_start if waiting else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if not waiting:
                return None
            continue
        if answer is not None:
            return answer
        running -= 1
    return None


def _accepts(host: str, port: int, deadline: float) -> bool:
    try:
        infos = socket.getaddrinfo(without_brackets(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for number, (family, kind, protocol, _, address) in enumerate(infos):
        left = (deadline - time.monotonic()) / (len(infos) - number)
        if left <= 0:
            return False
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(left)
                connection.connect(address)
                return True
        except OSError:
            continue
    return False


def _find(host: str) -> tuple[str, str] | None:
    """Returns the name and label of the interface that has an address."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        infos = socket.getaddrinfo(without_brackets(host), None, type=socket.SOCK_STREAM)
        found = next(_matches(infos, list(_assigned())), None)
    except (OSError, UnicodeError):
        return None
    return (found.interface, found.label) if found else None


def _matches(infos: Iterable[tuple[Any, ...]], assigned: list[_Assigned]) -> Iterator[_Assigned]:
    for family, _, _, _, sockaddr in infos:
        address = _plain(str(sockaddr[0]))
        scope = int(sockaddr[3]) if family == socket.AF_INET6 and len(sockaddr) == 4 else 0
        for candidate in assigned:
            # All of 127.0.0.0/8 is this host, although the interface lists only one address of it.
            loopback = address.is_loopback and candidate.address.is_loopback
            is_same = loopback or candidate.address == address
            if is_same and (not scope or scope == socket.if_nametoindex(candidate.interface)):
                yield candidate


def _plain(text: str) -> _IPAddress:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _assigned() -> Iterator[_Assigned]:
    """Yields the addresses of all interfaces, as the kernel lists them.

    The package ifaddr is not used: its import takes 40 ms and starts ldconfig or gcc, in a process that reaps its
    children itself. rtnetlink(7) would take 60 lines.
    """
    buffer = array.array("B", bytes(_IFCONF_SIZE))
    request = _IFCONF.pack(_IFCONF_SIZE, buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        used, _ = _IFCONF.unpack(fcntl.ioctl(kernel, _SIOCGIFCONF, request))
    for label, address in _IFREQ.iter_unpack(buffer[:used].tobytes()):
        yield _Assigned(ipaddress.IPv4Address(address), label.partition(b"\0")[0].decode())
    # The file does not exist if IPv6 is switched off.
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6") as table:
        for line in table:
            raw, *_, label = line.split()
            yield _Assigned(ipaddress.IPv6Address(bytes.fromhex(raw)), label)


def address_towards(hosts: Sequence[str], port: int) -> str | None:
    """Returns this host's source address for packets to the first of the hosts that can be resolved and routed to."""
    for host in hosts:
        with contextlib.suppress(OSError):
            for family, kind, *_, address in socket.getaddrinfo(without_brackets(host), port, type=socket.SOCK_DGRAM):
                # Connecting a datagram socket sends nothing; it only chooses the route.
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return None


BACKLOG = 1024
"""Connections that may wait in a listener's queue."""

_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def listen(host: str, ports: Sequence[int] | None) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: Address or name, IPv4 or IPv6; ``"::"`` takes IPv4 too.
        ports: First and last port to try, or None for any free one.

    Raises:
        OSError: No port of the range is free, or the host is not an address of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # Ports of a range are reused soon, and lingering connections of the last run do no harm.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                listener.bind((address[0], port, *address[2:]))
                listener.listen(BACKLOG)
            except OSError as error:
                if error.errno in _TAKEN:
                    continue
                raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
            listener.setblocking(False)
            stack.pop_all()
            return listener
    raise OSError(
        errno.EADDRINUSE, f"none of the ports {first} to {last} on {host} is free; free one or give a wider range"
    )


def tune(connection: socket.socket) -> None:
    """Sends small frames immediately, and detects a dead peer even when nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
