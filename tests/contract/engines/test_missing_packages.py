"""A package that is missing here is named, with the line that installs it, before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError, Launcher, LocalEngine, SparkEngine

FIND = importlib.util.find_spec


@pytest.mark.parametrize(
    ("engine", "package", "line"),
    [
        (LocalEngine(), "torch", "the ranks need torch here: pip install torch"),
        (SparkEngine(master="local[1]"), "torch", "the ranks need torch here: pip install torch"),
        (SparkEngine(), "pyspark", "Spark needs pyspark here: pip install pyspark"),
    ],
    ids=str,
)
def test_a_missing_package_is_named_with_its_install_line(
    engine: Any, package: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else FIND(name, *rest))
    with pytest.raises(InvalidJobError) as caught:
        Launcher(1, engine=engine, store=tmp_path).run(int)
    assert str(caught.value) == line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("store", "line"),
    [
        ("s3://bucket/runs", "s3://bucket/runs needs s3fs>=2024.12 here: pip install 's3fs>=2024.12'"),
        ("gs://bucket/runs", "gs://bucket/runs needs gcsfs>=2024.12 here: pip install 'gcsfs>=2024.12'"),
        ("az://box/runs", "az://box/runs needs adlfs>=2024.12 here: pip install 'adlfs>=2024.12'"),
    ],
)
def test_a_store_without_its_driver_is_named_with_its_install_line(
    store: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    def missing(location: str) -> None:
        raise ImportError("Install the driver")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(InvalidJobError) as caught:
        Launcher(1, store=store).run(int)
    assert line.partition(" ")[2] in str(caught.value)
    assert store in str(caught.value)


@pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
def test_a_frame_of_spark_without_its_packages_is_refused_before_a_training_starts(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else FIND(name, *rest))
    # Known as a DataFrame by the module of its class; nothing of it is used.
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe", "mapInArrow": None})()
    with pytest.raises(InvalidJobError) as caught:
        Launcher(1, engine=SparkEngine("local[1]"), store=tmp_path, dataset=frame).run(int)
    line = f"the dataset 'train' is computed by Spark, which needs {missing} here: pip install pandas pyarrow"
    assert str(caught.value) == line
    assert not list(tmp_path.glob("*/submissions/*.json"))
