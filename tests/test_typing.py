"""A wrong argument to the training function is a type error, before anything runs."""

from pathlib import Path

from mypy import api

PROGRAM = """
from rankzero import Launcher, RunHandle

def train(lr: float, *, steps: int = 1) -> dict[str, float]:
    return {"loss": lr * steps}

launcher = Launcher(2)
value: dict[str, float] = launcher.run(train, 0.1, steps=3)
handle: RunHandle[dict[str, float]] = launcher.submit(train, 0.1)
again: dict[str, float] = handle.result()
script: int = launcher.run("train.py", "--lr", 0.1)
launcher.run(train, "fast")
launcher.run(train, 0.1, step=3)
wrong: int = launcher.run(train, 0.1)
launcher.submit(train)
Launcher(2, use_gpus=True)
"""


def test_arguments_and_values_are_checked(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parent.parent
    report, problems, _ = api.run(
        ["--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache"), str(program)]
    )
    assert not problems
    wrong = {
        int(line.split(":")[1]) for line in report.splitlines() if line.startswith(str(program)) and ": error:" in line
    }
    first = next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if '"fast"' in line)
    assert wrong == set(range(first, first + 5)), report
