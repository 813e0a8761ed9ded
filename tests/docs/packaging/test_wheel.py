"""What is released: the wheel and the sdist, installed into a bare environment, with each extra alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import ROOT

from rankzero.values.formats import unpack

LOCK = ROOT / "constraints" / "{}.{}.txt".format(*sys.version_info)

QUICK_START = """
from rankzero import Launcher{engine}

def train(lr: float) -> dict:
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    return {{"of": dist.get_world_size(), **model.module.state_dict()}}

value = Launcher(2, store={store!r}{use}).run(train, lr=1e-3)
print(value["of"], tuple(value["weight"].shape))
"""

FRAME = """
from pyspark.sql import SparkSession
from rankzero import Launcher, SparkEngine
import rankzero.train as rt

def train():
    return int(sum(batch["id"].sum() for batch in rt.get_dataset_shard().iter_batches(4)))

session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
launcher = Launcher(1, engine=SparkEngine(session=session), store={store!r}, dataset=session.range(4))
print(launcher.run(train))
"""

NO_TORCH = """
from rankzero import Launcher, RankZeroError

try:
    Launcher(1, store={store!r}).run(lambda: 1)
except RankZeroError as error:
    print(type(error).__name__, "torch" in str(error))
"""

DAG = """
from airflow.sdk import DAG
from airflow_rankzero import TorchDistributorOperator
from airflow.providers_manager import ProvidersManager

with DAG("quick_start"):
    TorchDistributorOperator(task_id="train", train=print)
print("rankzero" in ProvidersManager().providers)
"""

DEFINITIONS = """
import dagster as dg
from dagster_rankzero import TorchDistributorResource, torch_asset

@torch_asset
def model() -> int:
    return 7

dg.Definitions(assets=[model], resources={{"torch_distributor": TorchDistributorResource()}})
print(model.key.path)
"""


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel that is made of it and of nothing else."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, "sdist", folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        unpack(archive, folder)
    build(next(path for path in folder.iterdir() if path.is_dir()), "wheel", folder)
    return Built(next(folder.glob("*.whl")), sdist)


def build(source: Path, target: str, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


class Environment:
    """A bare virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def run(self, program: str, folder: Path) -> str:
        """What a program prints last that lies in a folder of its own."""
        script = folder / "quick_start.py"
        script.write_text(program)
        # Nothing of the suite's own environment.
        java = os.path.dirname(shutil.which("java") or "")
        path = os.pathsep.join([str(self.python.parent), java, "/usr/bin", "/bin"])
        env = {"PATH": path, "HOME": str(folder), "AIRFLOW_HOME": str(folder / "airflow")}
        done = subprocess.run([self.python, script], cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]


def test_the_wheel_holds_what_is_used_and_no_more(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    packages = {"rankzero", "airflow_rankzero", "dagster_rankzero"}
    tops = {name.partition("/")[0] for name in names}
    (info,) = tops - packages
    assert packages <= tops
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert {f"{info}/{name}" for name in ("entry_points.txt", "licenses/LICENSE")} <= set(names)
    assert not [name for name in names if "test_" in name or "__pycache__" in name]


def test_the_sdist_holds_what_the_repository_does(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert {name for name in tracked if name.endswith((".py", ".md", ".toml"))} <= names


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("extras", "program", "said"),
    [
        pytest.param("", NO_TORCH, "InvalidJobError True", id="no extra"),
        pytest.param("[torch]", QUICK_START, "2 (1, 8)", id="torch"),
        pytest.param("[spark,torch]", QUICK_START, "2 (1, 8)", id="spark"),
        pytest.param("[data,spark,torch]", FRAME, "6", id="data"),
        pytest.param("[airflow]", DAG, "True", id="airflow"),
        pytest.param("[dagster]", DEFINITIONS, "['model']", id="dagster"),
    ],
)
def test_each_extra_installs_alone(built: Built, tmp_path: Path, extras: str, program: str, said: str) -> None:
    """From a package index, as after a release."""
    bare = Environment(tmp_path / "venv")
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    release = f"rankzero{extras} @ {built.wheel.as_uri()}"
    # As in scripts/setup.sh: the certificates of the system.
    trusting = {**os.environ, "UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}
    install = [uv, "pip", "install", "--quiet", "--python", bare.python, "-c", LOCK, release]
    subprocess.run(install, check=True, env=trusting)
    engine, use = (", SparkEngine", ', engine=SparkEngine("local[2]")') if "spark" in extras else ("", "")
    assert bare.run(program.format(engine=engine, use=use, store=str(tmp_path / "runs")), tmp_path) == said
