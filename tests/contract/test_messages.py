"""Errors name the wrong value, what was probably meant, and the run that they are about."""

from __future__ import annotations

import copy
import pickle
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rankzero.train as rt
from rankzero import (
    EngineError,
    InvalidJobError,
    Launcher,
    RankZeroError,
    RetryableError,
    RunHandle,
    RunNotFoundError,
    SparkEngine,
    WorkerFailedError,
)
from rankzero.testing import run_inline


def fail() -> None:
    raise ValueError("no such lr")


def test_an_error_knows_its_run(tmp_path: Path) -> None:
    launcher = Launcher(store=tmp_path, run_id="one", start_timeout=240)
    with pytest.raises(WorkerFailedError) as raised:
        launcher.run(fail)
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value)), _of(RunHandle.attach(tmp_path / "one"))):
        assert (error.run_id, error.directory) == ("one", str(tmp_path / "one"))
        shown = "".join(traceback.format_exception(error))
        assert shown.count(f"run directory: {tmp_path}/one") == 1
        assert error.code == "RZ-3000"
        assert "docs/errors.md#rz-3000" in shown
    with pytest.raises(RunNotFoundError) as missing:
        RunHandle.attach(tmp_path / "two")
    assert missing.value.directory == str(tmp_path / "two")
    with pytest.raises(InvalidJobError) as refused:
        Launcher(0)
    assert (refused.value.run_id, refused.value.directory) == (None, None)


def _of(handle: RunHandle[None]) -> RankZeroError:
    with pytest.raises(RankZeroError) as raised:
        handle.result()
    return raised.value


class Diverged(RetryableError):
    step: int

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"diverged at step {step}")


def test_a_subclass_of_a_user_keeps_its_attributes() -> None:
    assert Diverged(3).step == 3


def test_copies_of_a_launcher_are_equal() -> None:
    launcher = Launcher(2, store="x")
    assert copy.copy(launcher) == pickle.loads(pickle.dumps(launcher)) == replace(launcher) == launcher


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Launcher(engine="local"), "engine is 'local'; give LocalEngine"),
        (lambda: SparkEngine("sc://host"), r"give SparkConnectEngine\('sc://host'\)"),
        (lambda: SparkEngine("sc://me:secret1@h/;token=secret1"), r"Engine\('sc://me:\*\*\*@h/;\.\.\.'\)"),
        (lambda: SparkEngine("spark//host;token=secret1"), r"master is 'spark//host;\.\.\.'; use local"),
        (lambda: SparkEngine("spark://host"), r"use .*spark://host:port"),
        (lambda: SparkEngine(object()), "master is '<object object"),
        (lambda: Launcher(dataset={"rows": bytearray(b"secret")}), "'rows' is of type bytearray; give a Spark"),
    ],
)
def test_a_wrong_engine_or_dataset_is_refused_where_it_is_given(make: object, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message) as raised:
        make()  # type: ignore[operator]
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("loss", "metrics is 'loss'; give a dict"),
        ({"loss": torch.ones(3)}, "metric 'loss' is a Tensor of several elements"),
        ({"loss": None}, "metric 'loss' is of type NoneType"),
    ],
)
def test_a_wrong_metric_is_named(given: object, message: str) -> None:
    def train() -> None:
        rt.report(given)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=message):
        run_inline(train)


def test_a_model_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match=r"model is of type NoneType; give a torch\.nn\.Module"):
        run_inline(lambda: rt.prepare_model(None))


def _java(home: Path, version: str) -> str:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\n")
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="Some"\nJAVA_VERSION="{version}"\n')
    return str(home)


def test_a_java_that_cannot_run_spark_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(engine=SparkEngine("local[1]"), store=tmp_path / "store")
    monkeypatch.setenv("JAVA_HOME", "/opt/nonexistent-jdk")
    with pytest.raises(InvalidJobError, match="JAVA_HOME is '/opt/nonexistent-jdk', which has no bin/java"):
        launcher.run(fail)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0.1")
    for version, shown in (("11.0.2", "11"), ("1.8.0_392", "8")):
        monkeypatch.setenv("JAVA_HOME", _java(tmp_path / version, version))
        with pytest.raises(InvalidJobError, match=rf"Spark needs Java 17 or newer, and .* is {shown}: set JAVA_HOME"):
            launcher.run(fail)
    assert not (tmp_path / "store").exists()


def test_the_reason_of_a_jvm_that_does_not_start_is_in_the_error(tmp_path: Path) -> None:
    engine = SparkEngine("local[1]", {"spark.driver.memory": "lots"})
    with pytest.raises(EngineError, match=r"NumberFormatException|Size must be specified|lots") as raised:
        Launcher(engine=engine, store=tmp_path, run_id="one").run(fail)
    assert raised.value.directory == str(tmp_path / "one")
