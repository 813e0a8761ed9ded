"""What master and conf alone show to be impossible is refused before a JVM starts."""

from pathlib import Path
from typing import Any

import pytest

from rankzero import EngineError, InsufficientSlotsError, InvalidJobError, Launcher, SparkEngine
from rankzero.engines.spark import jvm
from rankzero.engines.spark.conf import conf_for, spark_defaults
from rankzero.engines.spark.stage import explain
from rankzero.job import Job


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a driver was started")

    monkeypatch.setattr("rankzero.submit.durable.start_driver", started)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refusal(error: type[Exception], engine: dict[str, Any], **options: Any) -> str:
    with pytest.raises(error) as caught:
        Launcher(**{"num_processes": 2, **options, "engine": SparkEngine(**engine)}).run(int)
    return str(caught.value)


@pytest.mark.parametrize("master", ["", "local[]", "local[x]", "mesos://x", "spark:/x", 7])
def test_an_unknown_master(master: object) -> None:
    with pytest.raises(InvalidJobError, match="master is"):
        SparkEngine(master=master)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("master", "conf", "slots"),
    [
        ("local", {}, 1),
        ("local[1]", {}, 1),
        ("local[2,3]", {"spark.task.cpus": "2"}, 1),
        ("local-cluster[1,1,1024]", {}, 1),
        ("local-cluster[2,3,1024]", {"spark.task.cpus": "4"}, 0),
        ("yarn", {"spark.executor.instances": "1"}, 1),
        ("k8s://https://h", {"spark.executor.instances": "1", "spark.executor.cores": "3", "spark.task.cpus": "3"}, 1),
        ("spark://host:7077", {"spark.cores.max": "3", "spark.task.cpus": "2"}, 1),
    ],
)
def test_more_processes_than_slots(master: str, conf: dict[str, str], slots: int) -> None:
    text = refusal(InsufficientSlotsError, {"master": master, "conf": conf})
    assert f"needs 2 task slots at the same time, but master {master!r} has {slots}" in text


def test_dynamic_allocation() -> None:
    conf = {"spark.dynamicAllocation.enabled": "true"}
    assert "SPARK-24942" in refusal(InvalidJobError, {"master": "local[2]", "conf": conf})


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({}, "spark.task.resource.gpu.amount is not set"),
        ({"spark.task.resource.gpu.amount": "0.5"}, "is '0.5'; a rank needs a whole GPU"),
        ({"spark.task.resource.gpu.amount": "1"}, "processes_per_task=2 ranks of a task need a GPU each"),
    ],
)
def test_gpu_conf_missing_or_too_small(conf: dict[str, str], message: str) -> None:
    engine = {"master": "spark://host:7077", "conf": conf}
    assert message in refusal(InvalidJobError, engine, use_gpu=True, processes_per_task=2)


GPUS = {"spark.task.resource.gpu.amount": "1", "spark.executor.resource.gpu.amount": "2"}


@pytest.mark.parametrize(
    ("master", "given", "defaults", "asked"),
    [
        # Two executors are what YARN and Kubernetes give who does not ask.
        ("yarn", {}, {}, {"spark.executor.instances": "8"}),
        ("k8s://https://host", {"spark.executor.cores": "3"}, {}, {"spark.executor.instances": "3"}),
        ("yarn", {"spark.task.cpus": "4"}, {}, {"spark.executor.instances": "8", "spark.executor.cores": "4"}),
        ("yarn", {"spark.executor.cores": "4", **GPUS}, {}, {"spark.executor.instances": "4"}),
        ("yarn", {}, {"spark.executor.cores": "4", "spark.executor.instances": "1"}, {"spark.executor.instances": "2"}),
        ("yarn", {}, {"spark.executor.instances": "9"}, {}),
        # What the user says for this run is left alone.
        ("yarn", {"spark.executor.instances": "3"}, {}, {}),
        # A standalone cluster gives what it has.
        ("spark://host:7077", {}, {}, {}),
        (
            "spark://host:7077",
            {},
            {"spark.dynamicAllocation.enabled": "true"},
            {"spark.dynamicAllocation.enabled": "false"},
        ),
    ],
)
def test_what_a_session_of_our_own_asks_for(
    master: str, given: dict[str, str], defaults: dict[str, str], asked: dict[str, str]
) -> None:
    job = Job("id", "train", 8, 1, False, "auto", None, 60.0, {}, min_processes=2)
    assert conf_for(job, master, given, defaults) == asked


def test_spark_defaults_are_read_as_spark_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# a comment", "", "spark.a 1", "spark.b=2", "  spark.c:  three words ", "spark.d\t-Dx=y", "spark.e"]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    found = {"spark.a": "1", "spark.b": "2", "spark.c": "three words", "spark.d": "-Dx=y", "spark.e": ""}
    assert spark_defaults() == found
    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert spark_defaults() == {}


def test_an_embedded_master_without_gpus() -> None:
    assert "needs 2 GPUs" in refusal(InsufficientSlotsError, {}, use_gpu=True)


def test_a_session_excludes_master_and_conf() -> None:
    with pytest.raises(InvalidJobError, match="give session= alone"):
        SparkEngine(master="local[2]", session=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidJobError, match="a classic SparkSession is needed"):
        SparkEngine(session=object())  # type: ignore[arg-type]


def test_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "find_java", lambda: None)
    assert "Java 17" in refusal(InvalidJobError, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[SPARK-24819]: Barrier execution mode does not allow", "lost slots"),
        ("at x\nRuntimeError: rankzero agent of task 1 ended by signal 9: ", "agent of task 1 ended by signal 9"),
        ("something else\n\tat java.lang.Thread", "the Spark job failed: something else"),
        (
            'at x\njava.io.IOException: Cannot run program "/x/python": error=2\n\tat java.lang.Thread',
            "the Spark job failed: the executors have no Python at '/x/python': set spark.pyspark.python",
        ),
    ],
)
def test_sparks_own_words_become_typed_errors(text: str, words: str) -> None:
    error = explain(text)
    assert isinstance(error, EngineError)
    assert words in str(error)
    assert "at java" not in str(error)


@pytest.mark.parametrize(
    ("environment", "conf", "chooses"),
    [
        ({}, {}, True),
        ({"JAVA_TOOL_OPTIONS": "-XX:+UseG1GC"}, {}, False),
        ({}, {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}, False),
    ],
)
def test_a_collector_that_somebody_chose_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], conf: dict[str, str], chooses: bool
) -> None:
    # A JVM that is told of two does not start.
    for name in jvm._OTHER_JAVA_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("GC" in jvm.short_lived(conf)) is chooses
