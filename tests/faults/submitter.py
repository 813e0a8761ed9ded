"""A process that submits a training, to be killed: ``python -m tests.faults.submitter '{"how": "run", ...}'``.

Writes the value as JSON into ``value``, or the error into ``error``, in the training's folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.trainings import note, train

from rankzero import Launcher, RankZeroError


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    options = asked["launcher"]
    launcher = Launcher(**options)
    folder = Path(asked["train"]["folder"])
    try:
        if asked["how"] == "run":
            value = launcher.run(train, **asked["train"])
        else:
            handle = launcher.submit(train, **asked["train"])
            note(folder / "submitted", "")
            value = handle.result()
            handle.acknowledge()
    except RankZeroError as error:
        note(folder / "error", json.dumps(error.to_json()))
        sys.exit(1)
    note(folder / "value", json.dumps(value))


if __name__ == "__main__":
    main()
