"""`Follower` yields each piece of news about a run once, and the end of the run last."""

from pathlib import Path

import rankzero.pipeline
from rankzero import Launcher, WorkerFailedError
from rankzero.pipeline import Follower, LineWritten, MetricsReported, RunEnded


def train(fail: bool) -> str:
    import rankzero.train as rt

    print("hello", flush=True)
    rt.report({"loss": 0.5})
    if fail:
        raise ValueError("no data")
    return "value"


def test_a_follower_yields_lines_metrics_and_the_end_once(tmp_path: Path) -> None:
    handle = Launcher(2, store=str(tmp_path)).submit(train, False)
    follower = Follower(handle)
    events = list(follower.follow())
    lines = [event.text for event in events if isinstance(event, LineWritten)]
    # On a slow machine the driver adds a line about tasks that have not started.
    assert sorted(line for line in lines if "rankzero: " not in line) == ["[0] hello", "[1] hello"]
    assert [event.values for event in events if isinstance(event, MetricsReported)] == [{"loss": 0.5}]
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status.state == "succeeded"
    assert follower.ended
    assert handle.result() == "value"
    # A later follower that attaches sees the same; this one has nothing new but the end.
    assert [type(event) for event in follower.poll()] == [RunEnded]
    again = [event.text for event in Follower(handle, attached=True).poll() if isinstance(event, LineWritten)]
    assert sorted(again) == sorted(lines)


def test_a_follower_shows_the_rank_that_failed_though_it_follows_another(tmp_path: Path) -> None:
    def fail_on_one() -> None:
        import rankzero.train as rt

        if rt.get_context().rank == 1:
            print("no data", flush=True)
            raise ValueError

    handle = Launcher(2, store=str(tmp_path)).submit(fail_on_one)
    events = list(Follower(handle, ranks=[0]).follow())
    assert LineWritten("[1] no data") in events
    assert isinstance(events[-1], RunEnded)
    error = events[-1].status.error
    assert error is not None
    assert error["type"] == WorkerFailedError.__name__


def test_every_name_of_the_interface_exists_and_is_documented() -> None:
    text = rankzero.pipeline.__doc__ or ""
    for name in rankzero.pipeline.__all__:
        assert getattr(rankzero.pipeline, name) is not None
        assert f"`{name}`" in text, f"{name} is not in the docstring of rankzero.pipeline"
