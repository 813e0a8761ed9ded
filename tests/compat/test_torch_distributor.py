"""pyspark's TorchDistributor as its users call it, with only the import changed; `test_guides` has the guides'."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import spark_session

from rankzero import EngineError, InsufficientSlotsError, InvalidJobError, TorchDistributor, WorkerFailedError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_failing_file_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    with pytest.raises(WorkerFailedError) as caught:
        distributor.run(str(tmp_path / "fails.py"))
    assert caught.value.exit_code == 7
    with pytest.raises(InvalidJobError, match="no such script"):
        distributor.run(str(tmp_path / "missing.py"))


def test_gpus_are_asked_for_by_default_and_never_silently_missed() -> None:
    with pytest.raises(InsufficientSlotsError, match="unable to be found on the driver: use_gpu=True needs 1 GPUs"):
        TorchDistributor()


def test_more_ranks_than_gpus_of_this_machine_are_as_many_as_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    distributor = TorchDistributor(num_processes=8, backend="gloo")
    [record] = [each for each in caplog.records if each.name == "TorchDistributor"]
    assert record.levelname == "WARNING"
    assert distributor.num_processes == distributor.num_tasks == 3
    assert distributor.run(lambda: __import__("os").environ["CUDA_VISIBLE_DEVICES"]) == "0,1,2"


def test_numpys_numbers_and_flags_and_the_public_attributes() -> None:
    distributor = TorchDistributor(np.int64(2), np.bool_(True), 0)  # type: ignore[arg-type]
    expected = {"num_processes": 2, "local_mode": True, "use_gpu": False, "num_tasks": 2}
    assert distributor.input_params == expected
    assert type(distributor.num_processes) is int
    assert distributor.logger.name == "TorchDistributor"
    assert distributor.ssl_conf == "pytorch.spark.distributor.ignoreSsl"


def test_the_training_may_be_named_and_a_file_has_no_keywords(tmp_path: Path) -> None:
    distributor = TorchDistributor(use_gpu=False)
    assert distributor.run(train_object=lambda a: a + 1, a=3) == 4
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ValueError, match="does not support key-word type arguments"):
        distributor.run(str(tmp_path / "train.py"), lr=1)


def test_the_session_of_another_thread_is_found(session: Any) -> None:
    found: list[Any] = []

    def launch() -> None:
        found.append(TorchDistributor(2, local_mode=False, use_gpu=False).run(lambda: "from a thread"))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert found == ["from a thread"]
    assert TorchDistributor(use_gpu=False).spark is session


def test_gpus_of_tasks_must_be_configured(session: Any) -> None:
    with pytest.raises(RuntimeError, match="'spark.task.resource.gpu.amount' was unset"):
        TorchDistributor(2, local_mode=False, use_gpu=True)


def test_on_spark_without_a_session_says_what_to_do() -> None:
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    with pytest.raises(EngineError, match="needs an active SparkSession"):
        TorchDistributor(local_mode=False, use_gpu=False).run(print)


def test_what_the_configuration_of_a_session_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a session of its own, with GPUs and TLS."""
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    script = tmp_path / "discover.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1", "2"]}\'\n')
    script.chmod(0o755)
    conf = {
        "spark.driver.resource.gpu.amount": "3", "spark.driver.resource.gpu.discoveryScript": str(script),
        "spark.task.resource.gpu.amount": "2", "spark.executor.resource.gpu.amount": "2",
        "spark.ssl.enabled": "true",
    }  # fmt: skip
    with spark_session("local[2]", **conf):
        expected = {"num_processes": 3, "local_mode": True, "use_gpu": True, "num_tasks": 3}
        assert TorchDistributor(8).input_params == expected
        assert TorchDistributor(8, local_mode=False).num_tasks == 4
        multiple = "num_processes=3 must be a multiple of 'spark.task.resource.gpu.amount', which is 2"
        with pytest.raises(RuntimeError, match=f"^{multiple}"):
            TorchDistributor(3, local_mode=False)
        plain = TorchDistributor(1, local_mode=False, use_gpu=False)
        with pytest.raises(RuntimeError, match="^the cluster has TLS encryption enabled"):
            plain.run(print)
        local = TorchDistributor(1, use_gpu=False).run(lambda: "local mode does not mind")
        assert local == "local mode does not mind"
        plain.spark.conf.set(plain.ssl_conf, "true")
        assert plain._check_encryption() is None
        assert "has TLS encryption enabled, but" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_processes": 0}, "num_processes is 0.*positive integer"),
        ({"num_processes": "2"}, "num_processes is '2'"),
        ({"use_gpu": "no"}, "use_gpu is 'no'"),
        ({"local_mode": None}, "local_mode is None"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidJobError, match=error):
        TorchDistributor(**arguments)
