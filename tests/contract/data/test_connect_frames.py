"""A DataFrame of a Spark Connect session as dataset."""

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import until
from tests.contract.engines.connect_server import ConnectServer
from tests.runs import lines_of

import rankzero.train as rt
from rankzero import InvalidJobError, Launcher, RunCancelledError, SparkConnectEngine
from rankzero.threads import in_thread

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def frame(connect_session: Any) -> Any:
    """Rows 0 to 100, in partitions of which one is empty."""
    rows = connect_session.range(0, 120, 1, 6).where("id < 101")
    return rows.selectExpr("id", "array(id / 2, 1D) AS pair", "nullif(concat('n', id), 'n7') AS name")


def seen() -> list[Any]:
    batches = list(rt.get_dataset_shard().iter_batches(16, shuffle=True))
    mine = [
        row
        for batch in batches
        for row in zip(batch["id"].tolist(), batch["pair"].tolist(), batch["name"], strict=True)
    ]
    return sorted(row for part in rt.all_gather_object(mine) for row in part)


EXPECTED = [(number, [number / 2, 1.0], f"n{number}" if number != 7 else None) for number in range(101)]


def test_ranks_on_this_machine_read_the_frame(launcher: Launcher, frame: Any) -> None:
    assert launcher.options(dataset=frame).run(seen) == EXPECTED


def test_ranks_on_the_server_read_the_frame_and_a_query(launcher: Launcher, server: ConnectServer, frame: Any) -> None:
    launcher = launcher.options(engine=SparkConnectEngine(server.url))
    assert launcher.options(dataset=frame).run(seen) == EXPECTED
    query = "SELECT id, array(id / 2, 1D) AS pair, concat('n', id) AS name FROM range(7)"
    assert launcher.options(dataset=query).run(seen) == EXPECTED[:7]


def test_a_cancel_while_the_server_computes_ends_the_query(
    launcher: Launcher, server: ConnectServer, connect_session: Any
) -> None:
    sleeping = "SELECT id FROM range(0, 16, 1, 16) WHERE java_method('java.lang.Thread', 'sleep', 600000L) IS NULL"
    handle = launcher.options(engine=SparkConnectEngine(server.url), dataset=sleeping).submit(seen)
    until(lambda: "Spark computes" in lines_of(Path(handle.directory)), 120.0, "the query runs")
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(60.0)
    # No slot is taken any more.
    assert in_thread(connect_session.range(4).count).result(60.0) == 4


def test_a_frame_that_cannot_be_a_dataset_is_refused(launcher: Launcher, connect_session: Any, tmp_path: Path) -> None:
    for frame, why in (
        (connect_session.range(0), "has no rows"),
        (connect_session.range(1), "has 1 rows for 2 ranks"),
        (connect_session.range(9).selectExpr("map('a', id) AS bad"), "column 'bad' of the dataset 'train' is map"),
        (connect_session.range(9).selectExpr("if(id = 3, null, id) AS bad"), "column 'bad' .* has 1 nulls"),
    ):
        with pytest.raises(InvalidJobError, match=why):
            launcher.options(dataset=frame).run(seen)
    assert list(tmp_path.glob("store/*/submissions/*/datasets/*")) == []
