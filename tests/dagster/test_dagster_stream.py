"""`TorchDistributorResource.run`: what Dagster gets while ranks train; several calls in one step."""

import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.conftest import until

import rankzero.train as rt
from dagster_rankzero import TorchDistributorResource
from rankzero import RunHandle

LOOKED = 2.5  # Seconds, longer than a driver takes between two statuses: by then a report could have been seen


def train(*pauses: float | str) -> int:
    """Reports before each pause: of so many seconds, or until whoever sees the report makes that file."""
    import time

    for epoch, pause in enumerate(pauses):
        rt.report({"loss": 1.0 / (epoch + 1), "epoch": epoch, "bad": float("nan"), "name": "x"})
        if isinstance(pause, str):
            until(Path(pause).exists, 120, "somebody sees the report")
        else:
            time.sleep(pause)
    return len(pauses)


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """The file that tells a training that its report was seen."""
    return tmp_path / "seen"


def note_events(context: Any, seen: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes the file when Dagster has stored an event of the step."""
    log_event = context.log_event

    def log_and_note(event: Any) -> None:
        log_event(event)
        seen.touch()

    patch.setattr(context, "log_event", log_and_note)


def test_a_point_of_the_curve_that_cannot_be_stored_does_not_end_the_training(
    one_rank: TorchDistributorResource, monkeypatch: pytest.MonkeyPatch, seen: Path
) -> None:
    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        def log_event(event: Any) -> None:
            seen.touch()
            raise OSError("the event log is away")

        monkeypatch.setattr(context, "log_event", log_event)
        return torch_distributor.run(context, train, str(seen))

    done = dg.materialize([model], resources={"torch_distributor": one_rank})
    assert done.output_for_node("model") == 1
    assert not [event for event in done.all_events if event.is_step_restarted]


def test_an_interrupt_while_a_point_is_stored_ends_the_training_and_what_its_run_would_train(
    one_rank: TorchDistributorResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[bool] = []

    def interrupt(*_: Any) -> Any:
        raise dg.DagsterExecutionInterruptedError

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def first(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        monkeypatch.setattr(context, "log_event", interrupt)
        try:
            return torch_distributor.run(context, endless)
        finally:
            (directory,) = Path(str(one_rank.store)).iterdir()
            lives.append(not RunHandle.attach(directory).status().final)

    @dg.asset
    def second(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.run(context, lambda: 1)

    done = dg.materialize([first, second], resources={"torch_distributor": one_rank}, raise_on_error=False)
    assert not done.success
    # The process that was interrupted would come back at once: whoever sits there would have to interrupt each try.
    assert lives == [False]
    # Dagster goes on with the other step, whose training does not begin.
    assert len(list(Path(str(one_rank.store)).iterdir())) == 1


def endless() -> None:

    rt.report({"loss": 1.0})
    threading.Event().wait()


@pytest.fixture
def one_rank(torch_distributor: TorchDistributorResource) -> TorchDistributorResource:
    return torch_distributor.options(num_processes=1, observation_interval=0.01)


def observed(result: dg.ExecuteInProcessResult) -> list[dict[str, Any]]:
    events = [event for event in result.all_events if event.event_type_value == "ASSET_OBSERVATION"]
    seen = [event.event_specific_data.asset_observation for event in events]
    return [{"partition": o.partition, **{name: entry.value for name, entry in o.metadata.items()}} for o in seen]


def test_an_asset_is_observed_while_its_ranks_train(
    one_rank: TorchDistributorResource, monkeypatch: pytest.MonkeyPatch, seen: Path
) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["a", "b"]))
    def model(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        note_events(context, seen, monkeypatch)
        return torch_distributor.run(context, train, str(seen), 0.0)

    result = dg.materialize([model], resources={"torch_distributor": one_rank}, partition_key="b")
    shown = observed(result)
    assert shown[0]["metric/epoch"] == 0
    # What is no number cannot be plotted.
    assert set(shown[0]) == {"partition", "metric/loss", "metric/epoch"}
    assert {entry["partition"] for entry in shown} == {"b"}
    (made,) = result.get_asset_materialization_events()
    assert made.materialization.metadata["metric/epoch"].value == 1
    assert result.output_for_node("model") == 2


def test_observations_can_be_switched_off_and_are_throttled(
    one_rank: TorchDistributorResource, monkeypatch: pytest.MonkeyPatch, seen: Path
) -> None:
    @dg.asset
    def silent(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        return torch_distributor.options(observation_interval=None).run(context, train, LOOKED)

    @dg.asset
    def throttled(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        note_events(context, seen, monkeypatch)
        return torch_distributor.options(observation_interval=600.0).run(context, train, str(seen), LOOKED)

    result = dg.materialize([silent, throttled], resources={"torch_distributor": one_rank})
    assert len(observed(result)) == 1


def test_a_step_may_train_twice_and_its_next_try_gets_what_was_done(
    one_rank: TorchDistributorResource, tmp_path: Path
) -> None:
    def note(word: str) -> str:
        with open(tmp_path / "trained", "a") as file:
            print(word, file=file)
        return word

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def pair(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        words = [torch_distributor.run(context, note, "pretrained").value]
        if context.retry_number == 0:
            raise OSError("lost")
        words.append(torch_distributor.options(name="tuned").run(context, note, "tuned").value)
        return words

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def changing(context: dg.AssetExecutionContext, torch_distributor: TorchDistributorResource):
        word = f"try {context.retry_number}"
        values = [torch_distributor.options(name=name).run(context, note, word).value for name in (None, word)]
        if context.retry_number == 0:
            raise OSError("lost")
        return values

    result = dg.materialize([pair, changing], resources={"torch_distributor": one_rank})
    assert result.output_for_node("pair") == ["pretrained", "tuned"]
    # A success is delivered until it is acknowledged, whatever the arguments; another name is another training.
    assert result.output_for_node("changing") == ["try 0", "try 1"]
    trained = sorted((tmp_path / "trained").read_text().split("\n"))
    assert trained == ["", "pretrained", "try 0", "try 0", "try 1", "tuned"]
