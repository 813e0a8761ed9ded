"""Which interface carries an address of this host, and which of several addresses answers.

Standard library only: this module travels to executors.
"""

from __future__ import annotations

import contextlib
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

NETLINK_TIMEOUT = 2.0
"""Seconds for the kernel to list this host's addresses."""

_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# linux/netlink.h and linux/rtnetlink.h
_NETLINK_ROUTE = 0
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP = 0x001, 0x300
_IFA_ADDRESS, _IFA_LOCAL, _IFA_LABEL = 1, 2, 3
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_DUMP_SIZE = 1 << 16


class _Assigned(NamedTuple):
    """An address of this host. ``label`` is the name that C's ``getifaddrs`` has for its interface."""

    address: _IPAddress
    interface: int
    label: str | None


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


def is_loopback(host: str) -> bool:
    """True for an address or name that means this host on every host."""
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
        infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
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
        infos = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        assigned = list(_assigned())
        found = next(_matches(infos, assigned), None)
        if found is None:
            return None
        name = socket.if_indextoname(found.interface)
    except (OSError, UnicodeError):
        return None
    return name, found.label or name


def _matches(infos: Iterable[tuple[Any, ...]], assigned: list[_Assigned]) -> Iterator[_Assigned]:
    for family, _, _, _, sockaddr in infos:
        address = _plain(str(sockaddr[0]))
        scope = int(sockaddr[3]) if family == socket.AF_INET6 and len(sockaddr) == 4 else 0
        for candidate in assigned:
            # All of 127.0.0.0/8 is this host, though the interface shows one address of it.
            loopback = address.is_loopback and candidate.address.is_loopback
            if (loopback or candidate.address == address) and scope in (0, candidate.interface):
                yield candidate


def _plain(text: str) -> _IPAddress:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _assigned() -> Iterator[_Assigned]:
    """Every address of every interface, as the kernel lists them (rtnetlink(7), RTM_GETADDR)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as kernel:
        kernel.settimeout(NETLINK_TIMEOUT)
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        flags = _NLM_F_REQUEST | _NLM_F_DUMP
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _RTM_GETADDR, flags, 1, 0) + request)
        while True:
            data = kernel.recv(_DUMP_SIZE)
            offset = 0
            while offset < len(data):
                length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel refused to list this host's addresses")
                if kind == _RTM_NEWADDR and (found := _parse(data[offset + _HEADER.size : offset + length])):
                    yield found
                offset += _aligned(length)


def _parse(message: bytes) -> _Assigned | None:
    _, _, _, _, interface = _ADDRESS.unpack_from(message)
    attributes: dict[int, bytes] = {}
    offset = _ADDRESS.size
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        attributes[kind] = message[offset + _ATTRIBUTE.size : offset + length]
        offset += _aligned(max(length, _ATTRIBUTE.size))
    # On a point-to-point link IFA_ADDRESS is the other end's.
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
    if raw is None:
        return None
    label = attributes.get(_IFA_LABEL)
    return _Assigned(ipaddress.ip_address(raw), interface, label.rstrip(b"\0").decode() if label else None)


def _aligned(length: int) -> int:
    """Netlink pads everything to 4 bytes."""
    return (length + 3) & ~3


def address_towards(hosts: Sequence[str], port: int) -> str | None:
    """The address of this host from which packets to the first of the hosts that has a name would leave."""
    for host in hosts:
        with contextlib.suppress(OSError):
            for family, kind, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                # Connecting a datagram socket sends nothing; it only chooses the route.
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return None
