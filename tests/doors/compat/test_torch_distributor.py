"""pyspark's TorchDistributor and DeepspeedTorchDistributor: the guides' code with changed imports, and edges."""

import json
import os
import re
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.services import spark_session
from torch.utils.data import DataLoader, TensorDataset

import rankzero.train as rt
from rankzero import EngineError, InvalidJobError, TorchDistributor
from rankzero.compat.deepspeed_distributor import DeepspeedTorchDistributor


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def train(learning_rate: float, use_gpu: bool) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DistributedSampler

    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = int(os.environ["LOCAL_RANK"]) if use_gpu else "cpu"
    model = DDP(torch.nn.Linear(10, 1).to(device))
    dataset = TensorDataset(torch.randn(16, 10))
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for [x] in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return len(loader)


def prints(a: str, b: str, c: str) -> str:
    print(f"Got a={a}, b={b}, c={c}")
    return "success"


TRAIN_FILE = """
    import argparse
    import torch, torch.distributed as dist
    import rankzero.train as rt

    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--my-key", default="")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.tensor(arguments.learning_rate * arguments.batch_size)
    dist.all_reduce(total)
    rt.set_result([round(total.item(), 6), arguments.my_key])
"""


@pytest.mark.parametrize("local_mode", [True, False], ids=["here", "spark"])
def test_the_guides(
    local_mode: bool, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not local_mode:
        request.getfixturevalue("session")
    with pytest.warns(DeprecationWarning, match="num_workers is called num_processes"):
        distributor = TorchDistributor(num_workers=2, local_mode=local_mode, use_gpu=False)
    assert distributor.run(train, 1e-3, False) == 8
    Path("train.py").write_text(textwrap.dedent(TRAIN_FILE))
    line = ["--learning-rate=1e-3", "--batch-size=64", "--my-key=my-value"]
    assert distributor.run("train.py", *line) == [0.128, "my-value"]
    assert distributor.run(train_object=prints, a=line[0], b=line[1], c=line[2]) == "success"
    assert "Got a=--learning-rate=1e-3, b=--batch-size=64, c=--my-key=my-value" in capsys.readouterr().out


def test_numpys_numbers_and_more_ranks_than_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    distributor = TorchDistributor(np.int64(2), np.bool_(True), 0)  # type: ignore[arg-type]
    assert distributor.input_params == {"num_processes": 2, "local_mode": True, "use_gpu": False, "num_tasks": 2}
    assert type(distributor.num_processes) is int
    assert distributor.ssl_conf == "pytorch.spark.distributor.ignoreSsl"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    distributor = TorchDistributor(num_processes=8, backend="gloo")
    [record] = [each for each in caplog.records if each.name == "TorchDistributor"]
    assert record.levelname == "WARNING"
    assert distributor.num_processes == distributor.num_tasks == 3
    assert distributor.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == "0,1,2"


def test_the_session_of_another_thread_is_found(session: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(TorchDistributor(2, local_mode=False, use_gpu=False).spark))
    thread.start()
    thread.join()
    assert found == [session]
    with pytest.raises(RuntimeError, match="'spark.task.resource.gpu.amount' was unset"):
        TorchDistributor(2, local_mode=False, use_gpu=True)


def test_what_the_configuration_of_a_session_allows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a session of its own, with GPUs and TLS."""
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        active.stop()
    with pytest.raises(EngineError, match="needs an active SparkSession"):
        TorchDistributor(local_mode=False, use_gpu=False)
    script = tmp_path / "discover.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1", "2"]}\'\n')
    script.chmod(0o755)
    conf = {
        "spark.driver.resource.gpu.amount": "3", "spark.driver.resource.gpu.discoveryScript": str(script),
        "spark.task.resource.gpu.amount": "2", "spark.executor.resource.gpu.amount": "2",
        "spark.ssl.enabled": "true",
    }  # fmt: skip
    with spark_session("local[2]", **conf):
        assert TorchDistributor(8).num_tasks == 3
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


CONFIG: Any = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def flags_of() -> Any:
    import json
    import sys

    *_, path = flags = sys.argv[1:]
    rt.set_result((flags, json.loads(Path(path).read_text()) if os.path.exists(path) else None))


@pytest.mark.parametrize("config", [None, CONFIG, "config.json", "/on/executors.json"], ids=repr)
def test_deepspeeds_configuration_is_on_the_command_line(config: Any) -> None:
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("train.py").write_text("from tests.doors.compat.test_torch_distributor import flags_of\nflags_of()\n")
    distributor = DeepspeedTorchDistributor(numGpus=1, nnodes=2, useGpu=False, deepspeedConfig=config)
    assert distributor.num_processes == 2
    flags, content = distributor.run(flags_of)
    [lr, *of_script], content_of_script = distributor.run("train.py", "--lr=0.5")
    assert lr == "--lr=0.5"
    assert flags[:2] == of_script[:2] == ["--deepspeed", "--deepspeed_config"][: len(flags)]
    assert content == content_of_script == (CONFIG if config in (CONFIG, "config.json") else None)
    assert not Path(flags[-1]).exists(), "no file of it is left"
    assert not Path(of_script[-1]).exists()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: TorchDistributor(), "unable to be found on the driver: use_gpu=True needs 1 GPUs"),
        (lambda: TorchDistributor(num_processes=0), "num_processes is 0.*positive integer"),
        (lambda: TorchDistributor(use_gpu="no"), "use_gpu is 'no'"),
        (lambda: TorchDistributor(local_mode=None), "local_mode is None"),
        (lambda: TorchDistributor(use_gpu=False).run("missing.py"), "no such script"),
        (lambda: TorchDistributor(use_gpu=False).run(__file__, lr=1), "positional arguments only, not lr"),
        (lambda: DeepspeedTorchDistributor(numGpus=0, useGpu=False), "numGpus is 0"),
        (lambda: DeepspeedTorchDistributor(useGpu=False, deepspeedConfig=7), "deepspeedConfig is 7; give a dict"),
        (lambda: DeepspeedTorchDistributor(useGpu=False, deepspeedConfig=__file__), "is no JSON object"),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: str) -> None:
    with pytest.raises((InvalidJobError, EngineError)) as caught:
        call()
    assert re.search(error, str(caught.value))
