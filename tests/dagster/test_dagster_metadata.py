"""What the UI shows of a run that has ended."""

import base64
import re
import xml.etree.ElementTree as ElementTree

import dagster as dg
import pytest
from tests.dagster.dagster_events import metadata_of

import rankzero.train as rt
from dagster_rankzero import torch_asset


def test_the_curve_and_the_throughput_of_a_run(resources: dict[str, object]) -> None:
    @torch_asset(num_processes=2)
    def model() -> int:
        for epoch in range(3):
            rt.report({"epoch": epoch, "train_loss": 3.0 - epoch, "lr": 0.1, "note": f"<{epoch}>"})
        return 1

    shown = metadata_of(dg.materialize([model], resources=resources), "model")
    assert shown["epochs_per_second"] > 0
    assert (shown["world_size"], shown["metric/train_loss"], shown["metric/epoch"]) == (2, 1.0, 2)
    title, _, picture = shown["loss_curve"].partition("](data:image/svg+xml;base64,")
    assert title == "![curves"
    svg = ElementTree.fromstring(base64.b64decode(picture.removesuffix(")")))
    # The first path is that of the axes.
    _, line = svg.findall("{http://www.w3.org/2000/svg}path")
    heights = [float(height) for height in re.findall(r"[ML][0-9.]+,([0-9.]+)", line.attrib["d"])]
    assert heights == sorted(heights)
    assert len(set(heights)) == 3


def test_metrics_of_any_name_and_size_fail_no_step(resources: dict[str, object]) -> None:
    @torch_asset
    def model() -> int:
        for sign in (1, -1):
            rt.report({"loss": sign * 1.7e308, "step": -sign * 2**1023, "loss\udcff": float(sign), "note": "\0\udce9"})
        return 1

    shown = metadata_of(dg.materialize([model], resources=resources), "model")
    assert (shown["metric/loss"], shown["metric/loss\\udcff"]) == (-1.7e308, -1.0)
    picture = shown["loss_curve"].partition("base64,")[2].removesuffix(")")
    assert "nan" not in base64.b64decode(picture).decode()


@pytest.mark.parametrize(
    ("broken", "left_out"),
    [
        ("dagster_rankzero.metadata.reports.rows_of", "loss_curve"),
        ("dagster_rankzero.metadata.curves.chart", "loss_curve"),
        ("dagster_rankzero.metadata._describe_end", "run_directory"),
        # The note of the delivery.
        ("rankzero.run.directory.Submission.record_delivery", ""),
    ],
)
def test_a_description_that_cannot_be_made_fails_no_step(
    broken: str, left_out: str, resources: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("no description \udcff")

    @torch_asset
    def model() -> int:
        for epoch in range(2):
            rt.report({"loss": 1.0 - epoch, "epoch": epoch})
        return 1

    monkeypatch.setattr(broken, fail)
    result = dg.materialize([model], resources={**resources, "io_manager": dg.mem_io_manager})
    assert result.output_for_node("model") == 1
    assert left_out not in metadata_of(result, "model")
    assert metadata_of(result, "model")
