"""What a task is sent of a checkpoint does not grow with the number of ranks."""

import json

import pytest

from rankzero.run.checkpoints import Manifest

RANKS = 1024


def manifest(sharded: bool) -> Manifest:
    part = {"format": "torch", "size": 1 << 30, "sha256": "0" * 64}
    ranks = range(RANKS if sharded else 1)
    parts = {str(rank): {**part, "file": f"rank-{rank}.torch"} for rank in ranks}
    return Manifest("0000-000000", 0, 0, 0.0, {}, RANKS, sharded, parts)


@pytest.mark.parametrize(("sharded", "told"), [(True, {"0", "8", "9"}), (False, {"0"})])
def test_a_task_is_sent_the_parts_of_its_ranks_and_rank_0s(sharded: bool, told: set[str]) -> None:
    message = manifest(sharded).for_ranks(range(8, 10))
    assert set(message["parts"]) == told
    assert message["formats"] == ["torch"]
    # All of them, for each of 1,024 tasks, were half a gigabyte.
    assert RANKS * len(json.dumps(message)) < 1 << 20
