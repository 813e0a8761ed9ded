"""How DeepSpeed's configuration reaches scripts and functions, with only the import changed."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rankzero import InvalidJobError
from rankzero.compat.deepspeed_distributor import DeepspeedTorchDistributor

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}

SCRIPT = """
    import argparse, json, os
    import rankzero.train as rt

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    parser.add_argument("--local_rank", default=os.environ["LOCAL_RANK"])
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config")
    found = vars(parser.parse_args())
    if found["deepspeed_config"]:
        found["config"] = json.load(open(found["deepspeed_config"]))
    rt.set_result(found)
"""


@pytest.mark.parametrize("given", ["dict", "file"])
def test_a_script_gets_it_on_its_command_line(tmp_path: Path, given: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    config: Any = CONFIG if given == "dict" else str(tmp_path / "config.json")
    distributor = DeepspeedTorchDistributor(numGpus=1, nnodes=2, useGpu=False, deepspeedConfig=config)
    assert distributor.num_processes == 2
    found = distributor.run(str(tmp_path / "train.py"), "--lr=0.5")
    assert found["config"] == CONFIG
    assert (found["lr"], found["deepspeed"]) == ("0.5", True)
    assert not Path(found["deepspeed_config"]).exists(), "no file of it is left"


def test_a_function_gets_it_in_its_command_line(tmp_path: Path) -> None:
    def train(lr: float) -> Any:
        import json
        import sys

        with open(sys.argv[3]) as file:
            return lr, sys.argv[1:3], json.load(file), sys.argv[3]

    lr, flags, config, path = DeepspeedTorchDistributor(useGpu=False, deepspeedConfig=CONFIG).run(train, 0.5)
    assert (lr, flags, config) == (0.5, ["--deepspeed", "--deepspeed_config"], CONFIG)
    assert not Path(path).exists()


def test_no_configuration_and_one_of_the_executors(tmp_path: Path) -> None:
    def train() -> list[str]:
        import sys

        return sys.argv[1:]

    assert DeepspeedTorchDistributor(useGpu=False).run(train) == ["--deepspeed"]
    there = DeepspeedTorchDistributor(useGpu=False, deepspeedConfig="/on/executors.json")
    assert there.run(train)[-1] == "/on/executors.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numGpus": 0}, "numGpus is 0"),
        ({"nnodes": 1.5}, "nnodes is 1.5"),
        ({"deepspeedConfig": 7}, "deepspeedConfig is a int"),
        ({"deepspeedConfig": __file__}, "is no JSON object"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        DeepspeedTorchDistributor(useGpu=False, **arguments)
