"""Where the ranks of a run meet, and what keeps torch's process groups from getting in each other's way.

Rank 0 binds the store's port and keeps it; the user's own ``init_process_group`` finds it. Runs inside of a rank.
Processes that a rank starts find it, too, by the variable with which torchrun says that somebody else holds the store.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rankzero.bounds import MEET_TIMEOUT
from rankzero.channel.frames import Message
from rankzero.channel.sockets import listen
from rankzero.host import network

DESTROYED_KEPT = 16
"""Process groups: when so many others have been destroyed, the threads of one have no work left."""

_store: object = None


def bind(start: Message) -> int:
    """Rank 0 binds the store's port now and keeps it.

    The user's ``init_process_group`` finds this server, because torch shares a multi-tenant
    store between users of one port in one process; so no port is guessed, freed and lost.

    Args:
        start: The agent's ``start``, with ``master_addr``, ``ports`` and the context of this rank.

    Returns:
        The port.
    """
    global _store
    import torch.distributed as dist

    host = start["master_addr"]
    # A socket of ours: torch's own takes connections of the whole network, and sees this host's under IPv6 addresses
    # that /etc/hosts does not know, so that it asks a DNS for the name of each.
    listener = listen(network.bind_address(host), start["ports"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1],
        start["context"]["world_size"],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        # Before 2.8 only the older of torch's two servers takes a socket.
        use_libuv=_torch_version() >= (2, 8),
    )
    _store = store
    return int(store.port)


def _torch_version() -> tuple[int, ...]:
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def meet(go: Message, rank: int) -> None:
    """Sets where rank 0 listens: the first of its addresses that this rank can reach.

    Raises:
        ConnectionError: none of them answers; says which were tried.
    """
    hosts, port = go["master_hosts"], go["master_port"]
    host = hosts[0]
    if rank != 0 and not (go["one_host"] and network.is_loopback(host)):
        reached = network.first_reachable(hosts, port, MEET_TIMEOUT)
        if reached is None:
            raise ConnectionError(
                f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {' or '.join(hosts)}, port {port}: "
                "is a firewall between the executors (see ports=), or does the name stand for another host?"
            )
        host = reached
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)


@dataclass
class _Groups:
    """What this rank's process groups have been so far.

    Attributes:
        ours: A group of ``env://`` may live, which meets at the store that outlives them all.
        generation: How often a default group was destroyed.
    """

    ours: bool = False
    generation: int = 0


def guard_groups() -> None:
    """Keeps the process groups that the user makes one after the other from getting in each other's way.

    torch keeps its rendezvous handlers by URL scheme; it has a function to add one, and none to replace one. What is
    not where it was in torch 2.13 is left alone, and so are groups of ``tcp://`` and ``file://``, whose stores are the
    user's.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = getattr(rendezvous, "_rendezvous_handlers", {})
    plain = handlers.get("env")
    if plain is not None:
        groups = _Groups()
        handlers["env"] = _separating(plain, groups)
        _watch_destroyed(groups)
    if hasattr(rendezvous, "_torchelastic_use_agent_store"):
        # For the processes that this rank starts: none of them can bind the port that rank 0 holds. Not for the rank
        # itself, which may as well meet its peers at a port of its own, where nobody else would hold the store.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
        rendezvous._torchelastic_use_agent_store = lambda: False  # type: ignore[attr-defined]


def _separating(plain: Callable[..., Any], groups: _Groups) -> Callable[..., Any]:
    """The handler, with a key space of its own for every generation of groups in the store that outlives them all.

    Else a group that is made after another was destroyed reads its peers' old addresses, and hangs. It is counted what
    all ranks do together: one of them alone may ask for the store.
    """
    import torch.distributed as dist

    def separate(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in plain(*args, **kwargs):
            groups.ours = True
            prefix = f"rankzero-{groups.generation}"
            yield dist.PrefixStore(prefix, store), rank, world_size  # type: ignore[attr-defined]

    return separate


def _watch_destroyed(groups: _Groups) -> None:
    """Counts generations, and lets the last groups that were destroyed end their threads later, or never.

    A model in DistributedDataParallel is the last that holds a group which the training has destroyed. When the
    training returns, the end of the model ends the group: gloo's destructor waits for its thread, with the
    interpreter's lock, for which that thread may wait to let go of the last collective's context (torch 2.13, and
    others before it: pytorch/pytorch issues 56297, 190489). A training that had returned would hang for ever.
    """
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    living = getattr(getattr(c10d, "_world", None), "pg_map", None)
    if living is None:
        return
    destroy: Callable[..., None] = c10d.destroy_process_group
    kept: deque[object] = deque(maxlen=DESTROYED_KEPT)

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        before = list(living)
        destroy(*args, **kwargs)
        if groups.ours:
            kept.extend(group for group in before if group not in living)
        if not living:
            groups.ours = False
            groups.generation += 1

    for module in (c10d, importlib.import_module("torch.distributed")):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
