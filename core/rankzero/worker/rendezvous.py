"""The rendezvous of the ranks, and the isolation of torch's process groups from each other.

Rank 0 binds the store's port and keeps it; the user's ``init_process_group`` finds it. Runs inside a rank. Processes
that a rank starts find it, too, by the variable with which torchrun announces that another process serves the store.
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
from rankzero.channel.messages import Assign, Go
from rankzero.host import network

DESTROYED_KEPT = 16  # Destroyed process groups that are kept alive; after so many later ones, threads of one are idle

_store: object = None
_address: object = None  # Of rankzero's store, as MASTER_ADDR and MASTER_PORT


def bind(assigned: Assign) -> int:
    """Binds the rendezvous store's port in rank 0 and keeps it; returns the port.

    So no port is guessed, freed and lost. A group of ``tcp://`` finds this server, too, because torch shares a
    multi-tenant store between users of one port in one process.
    """
    global _store
    import torch
    import torch.distributed as dist

    host = assigned.master_addr
    # rankzero's own socket: torch's accepts connections of the whole network, and sees this host's under IPv6 addresses
    # that /etc/hosts does not have, so that it queries a DNS for the name of each.
    listener = network.listen(network.bind_address(host), assigned.ports)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1],
        assigned.context["world_size"],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        # Before 2.8 only the older of torch's two servers accepts a socket.
        use_libuv=tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8),
    )
    _store = store
    return int(store.port)


def meet(go: Go, rank: int) -> None:
    """Sets MASTER_ADDR and MASTER_PORT to the first address of rank 0 that this rank can reach.

    Raises:
        ConnectionError: no address accepts a connection; the message has those that were tried.
    """
    global _address
    hosts, host, port = go.master_hosts, go.master_hosts[0], go.master_port
    if rank != 0 and not (go.one_host and network.is_loopback(host)):
        reached = network.first_reachable(hosts, port, MEET_TIMEOUT())
        if reached is None:
            raise ConnectionError(
                f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {' or '.join(hosts)}, port {port}: "
                "is a firewall between the executors (see ports=), or does the name stand for another host?"
            )
        host = reached
    _address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)


@dataclass
class _Groups:
    """State of this rank's process groups."""

    ours: bool = False  # True if a group of ``env://``, which uses rankzero's store, may exist
    generation: int = 0  # How often the last group was destroyed
    is_joining: bool = False  # True while rankzero's store is opened for a group of ``env://``


def guard_groups() -> Callable[[], bool]:
    """Isolates process groups that the user makes one after the other from each other.

    Returns a function that returns True if a group was made, or if that is not known.

    torch keeps its rendezvous handlers by URL scheme; it has a function to add one, but none to replace one. Attributes
    that are missing in another torch than 2.13 are skipped. Groups of ``tcp://`` and ``file://`` are unchanged, since
    their stores are the user's.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = getattr(rendezvous, "_rendezvous_handlers", {})
    plain = handlers.get("env")
    groups = _Groups()
    if plain is not None:
        handlers["env"] = functools.partial(_separate, plain, groups)
        _watch_destroyed(groups)
    if hasattr(rendezvous, "_torchelastic_use_agent_store"):
        # Processes that a rank starts ask the environment. The rank itself may serve the store of another port.
        rendezvous._torchelastic_use_agent_store = lambda: groups.is_joining  # type: ignore[attr-defined]
    is_initialized: Callable[[], bool] = importlib.import_module("torch.distributed").is_initialized
    return lambda: plain is None or groups.generation > 0 or is_initialized()


def _separate(plain: Callable[..., Any], groups: _Groups, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Calls the handler, and gives each generation of groups its own key prefix in the shared store.

    Without it, a group that is made after another was destroyed reads its peers' old addresses, and hangs. Destroyed
    groups are counted, and no calls of the handler, because one rank alone may call it.
    """
    import torch.distributed as dist

    # Rank 0 joins as a client, too: the owner of a server looks only every 10 ms whether all ranks have joined.
    groups.is_joining = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == _address
    try:
        store, rank, world_size = next(plain(*args, **kwargs))
    finally:
        groups.is_joining = False
    groups.ours, own = True, dist.PrefixStore(f"rankzero-{groups.generation}", store)  # type: ignore[attr-defined]
    if own.add("joined", 1) >= world_size:
        own.set("complete", "")
    if rank == 0 and not groups.generation:
        own.wait(["complete"])  # As that owner, and for as long
    yield own, rank, world_size


def _watch_destroyed(groups: _Groups) -> None:
    """Counts generations, and keeps the last destroyed groups alive, so that the training's return frees none of them.

    A model in DistributedDataParallel often has the last reference to a destroyed group. When the training returns and
    the model is freed, gloo's destructor joins its thread without releasing the GIL, for which that thread may wait to
    free the last collective's context (torch 2.13 and earlier: pytorch/pytorch issues 56297, 190489). A training that
    had returned would hang indefinitely.
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
