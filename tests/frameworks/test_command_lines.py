"""Lines of `accelerate launch` and `deepspeed`, as `rankzero run` takes them: `make test-frameworks`.

Most lines are only translated; one of each launcher trains.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError
from rankzero.cli import lines

HAS_ACCELERATE, HAS_DEEPSPEED = (importlib.util.find_spec(name) is not None for name in ("accelerate", "deepspeed"))
needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="not installed: accelerate; make test-frameworks")
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="not installed: deepspeed; make test-frameworks")

NOTHING: dict[str, Any] = {
    "num_processes": None, "nproc_per_node": None, "nnodes": None, "node_rank": 0, "engine": "local", "module": False,
    "no_python": False, "use_gpu": False, "max_restarts": 0, "env": {},
}  # fmt: skip
"""What `rankzero run` has without options."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of Accelerate's of whoever runs this, and no GPUs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if HAS_ACCELERATE:
        monkeypatch.setattr("accelerate.commands.launch.default_config_file", str(tmp_path / "no such file"))


def translated(line: str, **options: Any) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    script, *arguments = line.split()
    script, words, found = lines.translated(script, tuple(arguments), {**NOTHING, **options})
    return script, words, {name: value for name, value in found.items() if value != NOTHING[name]}


@needs_accelerate
def test_a_line_of_accelerate() -> None:
    line = "accelerate launch --num_processes 4 --mixed-precision bf16 --max_restarts 2 train.py --lr 1"
    script, arguments, found = translated(line, env={"MODE": "quick"})
    env = found.pop("env")
    assert (script, arguments) == ("train.py", ("--lr", "1"))
    assert found == {"nproc_per_node": "4", "nnodes": "1", "max_restarts": 2}
    assert (env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_USE_CPU"], env["MODE"]) == ("bf16", "true", "quick")
    assert not {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PATH"} & set(env)


@needs_accelerate
def test_options_of_accelerate_that_become_variables() -> None:
    _, _, found = translated(
        "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_offload_params true --num_processes 2 "
        "--num_cpu_threads_per_process 3 --debug train.py"
    )
    wanted = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true", "OMP_NUM_THREADS": "3",
              "ACCELERATE_DEBUG_MODE": "true"}  # fmt: skip
    assert {name: found["env"][name] for name in wanted} == wanted
    _, _, found = translated(
        "accelerate launch --use_deepspeed --zero_stage 3 --deepspeed_config_file ds.json --num_processes 2 "
        "-m acme.train"
    )
    wanted = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
              "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}  # fmt: skip
    assert {name: found["env"][name] for name in wanted} == wanted
    assert found["module"] is True


@needs_accelerate
def test_a_configuration_file_of_accelerate(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_machines: 2\n"
        "num_processes: 8\nmachine_rank: 0\nuse_cpu: true\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    )
    _, _, found = translated(f"accelerate launch --config_file {file} train.py", engine="spark://master:7077")
    env = found.pop("env")
    assert found == {"nproc_per_node": "4", "nnodes": "2", "engine": "spark://master:7077"}
    assert (env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_USE_CPU"]) == ("bf16", "true")


@needs_accelerate
def test_gpus_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankzero.engines.gpus.local_gpus", lambda: ["0", "1", "2"])
    assert translated("accelerate launch --num_processes 2 train.py")[2]["use_gpu"] is True
    assert "use_gpu" not in translated("accelerate launch --cpu --num_processes 2 train.py")[2]
    line = "accelerate launch --multi_gpu --gpu_ids 0,2 --num_processes 2 train.py"
    assert translated(line)[2]["use_gpu"] is True
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    with pytest.raises(InvalidJobError, match="--gpu_ids names GPUs of one machine"):
        translated(line, engine="yarn")


@needs_accelerate
def test_gpus_of_this_machine_say_nothing_about_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankzero.engines.gpus.local_gpus", lambda: ["0", "1"])
    line = "accelerate launch {} --num_processes 2 train.py"
    with pytest.raises(InvalidJobError, match="does not say whether ranks on the cluster use GPUs"):
        translated(line.format(""), engine="yarn")
    assert translated(line.format("--multi_gpu"), engine="yarn")[2]["use_gpu"] is True
    assert translated(line.format(""), engine="yarn", use_gpu=True)[2]["use_gpu"] is True
    assert "use_gpu" not in translated(line.format("--cpu"), engine="yarn")[2]
    with pytest.raises(InvalidJobError, match="does not say how many ranks the cluster has: give --num_processes"):
        translated("accelerate launch --multi_gpu train.py", engine="yarn")


@needs_deepspeed
def test_a_line_of_deepspeed_for_a_cluster_says_whether_ranks_use_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(InvalidJobError, match="does not say whether ranks on the cluster use GPUs"):
        translated("deepspeed --num_gpus 2 train.py", engine="yarn")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert "use_gpu" not in translated("deepspeed --num_gpus 2 train.py", engine="yarn")[2]


@needs_accelerate
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("accelerate launch --tpu train.py", "SageMaker, TPUs and MPI are not supported"),
        (
            "accelerate launch --multi_gpu --cpu train.py",
            "accelerate launch refuses this line: You can only use one of",
        ),
        ("accelerate launch --cpu --num_machines 2 --num_processes 3 train.py", "3 is no multiple of --num_machines 2"),
        ("accelerate launch --config_file /nowhere.yaml train.py", "refuses this line: .* does not exist"),
    ],
)
def test_lines_of_accelerate_that_are_refused(line: str, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        translated(line)


@needs_deepspeed
def test_a_line_of_deepspeed() -> None:
    script, arguments, found = translated("deepspeed --num_gpus 4 train.py --deepspeed ds.json")
    assert (script, arguments) == ("train.py", ("--local_rank=${local_rank}", "--deepspeed", "ds.json"))
    assert found == {"nproc_per_node": "4", "nnodes": "1", "env": {"LOCAL_SIZE": "4"}}
    line = "deepspeed --num_nodes 2 --num_gpus 4 --no_local_rank --module acme.train"
    script, arguments, found = translated(line, engine="yarn", use_gpu=True)
    assert (script, arguments) == ("acme.train", ())
    assert found == {"nproc_per_node": "4", "nnodes": "2", "engine": "yarn", "use_gpu": True, "module": True}


@needs_deepspeed
def test_gpus_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    line = f"deepspeed --hostfile {tmp_path}/hosts --include localhost:1,2 train.py"
    assert translated(line)[2]["nproc_per_node"] == "2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert (
        translated(f"deepspeed --hostfile {tmp_path}/hosts --exclude localhost:1 train.py")[2]["nproc_per_node"] == "2"
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"


@needs_deepspeed
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "deepspeed --hostfile {hosts} train.py",
            "the line names the hosts worker-0, worker-1: leave",
        ),
        ("deepspeed --include worker-3:0 train.py", "'worker-3' not found in hostfile; to train on hosts name a"),
        ("deepspeed --autotuning run train.py", "--autotuning is not supported: call deepspeed itself"),
    ],
)
def test_lines_of_deepspeed_that_are_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=2\n")
    with pytest.raises(InvalidJobError, match=message):
        translated(line.format(hosts=tmp_path / "hosts"))
    with pytest.raises(InvalidJobError, match="does not say how many ranks each node of the cluster has"):
        translated("deepspeed train.py", engine="yarn")


def rankzero(tmp_path: Path, line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RANKZERO_STORE": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "rankzero.cli", *line.split()]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)


ACCELERATE = """
    import sys
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for [x] in loader:
        with accelerator.autocast():
            loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print("found", accelerator.num_processes, len(loader), accelerator.mixed_precision)
"""


@needs_accelerate
def test_a_script_trains_by_its_line_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(ACCELERATE))
    line = "accelerate launch --num_processes 2 --mixed_precision bf16 --rdzv_backend c10d train.py --lr 0.1"
    done = rankzero(tmp_path, line)
    assert done.returncode == 0, done.stderr
    assert {f"[{rank}] found 2 4 bf16" for rank in (0, 1)} <= set(done.stdout.splitlines())
    assert "rankzero: --rdzv_backend has no meaning here and is ignored" in done.stderr
    done = rankzero(tmp_path, "accelerate launch --num_machines 2 --num_processes 4 train.py")
    assert (done.returncode, "this line is for several nodes" in done.stderr) == (2, True), done.stderr


DEEPSPEED = """
    import argparse
    import deepspeed, torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.deepspeed)
    loss = engine(torch.ones(2, 4)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    print("found", engine.world_size, args.local_rank, engine.zero_optimization_stage())
"""


@needs_deepspeed
def test_a_script_trains_by_its_line_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(DEEPSPEED))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = rankzero(tmp_path, "deepspeed --num_gpus 2 train.py --deepspeed ds.json")
    assert done.returncode == 0, done.stderr
    assert {f"[{rank}] found 2 {rank} 2" for rank in (0, 1)} <= set(done.stdout.splitlines())
    done = rankzero(tmp_path, "deepspeed --num_nodes 2 --num_gpus 2 train.py")
    assert (done.returncode, "this line is for several nodes" in done.stderr) == (2, True), done.stderr
