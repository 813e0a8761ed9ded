"""Listens on this host, and finds the interface of an address of it, and the first reachable one of several addresses.

Standard library only: this module is shipped to executors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915  # netdevice(7)

BACKLOG = 1024
"""Connections that may wait in a listener's queue."""


def socket_environment(host: str) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL use the interface of an address of this machine.

    Without them gloo uses what the host name resolves to, which may be a loopback address, and
    NCCL the first interface of its own order.

    Args:
        host: The name or address under which the other hosts reach this one.

    Returns:
        ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``; empty if the interface is not known.
    """
    # All of 127.0.0.0/8 is this host, although the interface lists only one address of it.
    named = ("127.0.0.1" if is_loopback(address) else address for address in addresses_of(host))
    interfaces = _interfaces()
    for address in named:
        if name := interfaces.get(address):
            # NCCL: without "=" the value is a prefix of the names.
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


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
    found = map(ipaddress.ip_address, _interfaces() or addresses_of(socket.gethostname()))
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
        hosts: Names or addresses, tried one after the other: packets to some networks are lost without an answer.
        port: The TCP port.
        timeout: Seconds for all together, of which each has an equal part.

    Returns:
        The entry of ``hosts``, or None if none accepted in time.
    """
    for host in hosts:
        with contextlib.suppress(OSError, UnicodeError):
            socket.create_connection((without_brackets(host), port), timeout / len(hosts)).close()
            return host
    return None


def _interfaces() -> dict[str, str]:
    """Returns this host's addresses with the names of their interfaces; of IPv4, each interface's first address.

    The package ifaddr is not used: its import takes 40 ms and starts ldconfig or gcc, in a process that reaps its
    children itself. Empty where the kernel does not list them.
    """
    found = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        for _, name in socket.if_nameindex():
            # Raises if the interface has no such address, or on macOS.
            with contextlib.suppress(OSError):
                request = fcntl.ioctl(kernel, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(request[20:24])] = name
    # The file does not exist if IPv6 is switched off.
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for raw, *_, name in map(str.split, table):
            found[str(ipaddress.IPv6Address(bytes.fromhex(raw)))] = name
    return found


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
        try:
            listener = socket.create_server(
                (address[0], port, *address[2:]),
                family=family,
                backlog=BACKLOG,
                dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                why = os.strerror(error.errno or 0)
                raise OSError(error.errno, f"cannot listen on {host} port {port}: {why}") from None
        else:
            listener.setblocking(False)
            return listener
    raise OSError(
        errno.EADDRINUSE, f"none of the ports {first} to {last} on {host} is free; free one or give a wider range"
    )


def tune(connection: socket.socket) -> None:
    """Sends small frames immediately, and detects a dead peer even when nothing is sent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
