"""Which interface carries an address of this host, and which of several addresses answers.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import array
import contextlib
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

HEAD_START = 0.25
"""Seconds by which a host is tried before the next one, so that the order is a preference."""

_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# netdevice(7)
_SIOCGIFCONF = 0x8912
_IFCONF = struct.Struct("iP")
_IFREQ = struct.Struct("16s4x4s16x")
_IFCONF_SIZE = 1 << 16


class _Assigned(NamedTuple):
    """An address of this host. ``label`` is the name that C's ``getifaddrs`` has for its interface: ``eth0:1``."""

    address: _IPAddress
    label: str

    @property
    def interface(self) -> str:
        return self.label.partition(":")[0]


def interface_of(host: str) -> str | None:
    """The network interface of this machine that carries an address.

    Args:
        host: A name, or an IPv4 or IPv6 address (brackets allowed). A name is looked up, which may wait.

    Returns:
        The interface's name; None if no interface has the address (NAT, a service's address), the
        name is unknown, or this is not Linux.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    found = _find(host)
    return found[0] if found else None


def socket_environment(host: str) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface of an address of this machine.

    Without them gloo uses what the host name resolves to, which may be a loopback address, and
    NCCL the first interface of its own order.

    Args:
        host: As for `interface_of`: the address under which the other hosts reach this one.

    Returns:
        ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``; empty if the interface is not known.
    """
    found = _find(host)
    if found is None:
        return {}
    name, label = found
    # NCCL: "=" asks for exactly this name; without it, for every name that begins so. Both libraries
    # see labels ("eth0:1"), but NCCL reads what follows a colon as a port.
    return {"GLOO_SOCKET_IFNAME": label, "NCCL_SOCKET_IFNAME": f"={name}" if label == name else name}


def without_brackets(host: str) -> str:
    """A host as the resolver takes it: Spark writes an IPv6 address as a URL has it, ``[::1]``."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def addresses_of(host: str) -> list[str]:
    """What a host's name stands for here; the host itself if it is an address, or stands for nothing."""
    try:
        infos = socket.getaddrinfo(without_brackets(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [host]
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def own_addresses() -> list[str]:
    """The addresses of this host under which others may reach it, as far as the kernel lists them."""
    if not sys.platform.startswith("linux"):
        return addresses_of(socket.gethostname())
    try:
        found = [assigned.address for assigned in _assigned()]
    except OSError:
        return addresses_of(socket.gethostname())
    return [str(address) for address in found if not (address.is_loopback or address.is_link_local)]


def bind_address(host: str) -> str:
    """Where to listen for those who connect to an address or name of this machine: all its addresses, or loopback."""
    if is_loopback(host):
        return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """True for an address or name that means this host on every host."""
    host = without_brackets(host)
    return host.startswith("127.") or host in ("::1", "localhost")


def first_reachable(hosts: Sequence[str], port: int, timeout: float) -> str | None:
    """The first of several hosts that accepts a TCP connection; the connection is closed at once.

    Args:
        hosts: Names or addresses, the preferred one first. Each has a short start before the next.
        port: The TCP port.
        timeout: Seconds for all together, name lookups included, also when a lookup hangs.

    Returns:
        The host as it was given, or None if none accepted in time.
    """
    deadline = time.monotonic() + timeout
    head_start = min(HEAD_START, timeout / (2 * len(hosts))) if hosts else 0.0
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
    """Name and label of the interface that carries an address."""
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
            # All of 127.0.0.0/8 is this host, though the interface shows one address of it.
            loopback = address.is_loopback and candidate.address.is_loopback
            is_same = loopback or candidate.address == address
            if is_same and (not scope or scope == socket.if_nametoindex(candidate.interface)):
                yield candidate


def _plain(text: str) -> _IPAddress:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _assigned() -> Iterator[_Assigned]:
    """Every address of every interface, as the kernel lists them.

    Not by the package ifaddr, which would save ten of these lines: importing it takes 40 ms and starts ldconfig, and
    where that does not help gcc, in a process that collects its children itself. Nor by rtnetlink(7): 60 lines.
    """
    buffer = array.array("B", bytes(_IFCONF_SIZE))
    request = _IFCONF.pack(_IFCONF_SIZE, buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        used, _ = _IFCONF.unpack(fcntl.ioctl(kernel, _SIOCGIFCONF, request))
    for label, address in _IFREQ.iter_unpack(buffer[:used].tobytes()):
        yield _Assigned(ipaddress.IPv4Address(address), label.partition(b"\0")[0].decode())
    # Not there if IPv6 is switched off.
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6") as table:
        for line in table:
            raw, *_, label = line.split()
            yield _Assigned(ipaddress.IPv6Address(bytes.fromhex(raw)), label)


def address_towards(hosts: Sequence[str], port: int) -> str | None:
    """The address of this host from which packets to the first of the hosts that has a name would leave."""
    for host in hosts:
        with contextlib.suppress(OSError):
            for family, kind, *_, address in socket.getaddrinfo(without_brackets(host), port, type=socket.SOCK_DGRAM):
                # Connecting a datagram socket sends nothing; it only chooses the route.
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return None
