"""Every interleaving of the file operations of submitters, drivers, followers and removers, with crashes and doubts."""

from __future__ import annotations

import pytest
from tests.protocol.model import SCOPES, Scope, explore
from tests.protocol.steps import Config


@pytest.mark.parametrize("links", [True, False], ids=["disk", "object store"])
@pytest.mark.parametrize("scope", SCOPES, ids=[one.name for one in SCOPES])
def test_no_interleaving_breaks_a_promise(scope: Scope, links: bool) -> None:
    if links not in scope.links:
        pytest.skip("not on this store")
    states, violation = explore(scope, Config(links, scope.steps, frozenset(), scope.tries))
    assert violation is None, "\n".join(violation)
    assert states > 1


NEEDED = {
    "end before replacing": ("two submitters", True),
    "exclusive claim": ("two submitters", True),
    "garbage by number": ("sweep and submitters", True),
    "look whether it is there": ("rm -rf of a live run", False),
    "manifest last": ("doubt: a driver is replaced and comes back", True),
    "nonce in names": ("two submitters", True),
    "the end before deleting": ("doubt: a driver is replaced and comes back", True),
    "the first end wins": ("doubt: a driver is replaced and comes back", True),
    "the end that counts": ("doubt: a driver is replaced and comes back", True),
    "the tombstone stays": ("gc and a submitter", True),
    "tombstone": ("two submitters", True),
}
"""Steps of the protocol, with a scope that shows that it is needed; whether on a disk."""


@pytest.mark.parametrize("step", NEEDED)
def test_each_step_is_needed(step: str) -> None:
    name, links = NEEDED[step]
    (scope,) = [one for one in SCOPES if one.name == name]
    _, violation = explore(scope, Config(links, scope.steps, frozenset([step]), scope.tries))
    assert violation
