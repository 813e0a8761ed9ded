"""A process that submits a training, to be killed: ``python -m tests.faults.submitter '{"how": "run", ...}'``.

Writes ``submitted`` into the training's folder when the run is there, and prints the value as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.kit import ProxyEngine
from tests.faults.trainings import note, train

from rankzero import Launcher


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    options = asked["launcher"]
    if target := asked.get("proxy"):
        options["engine"] = ProxyEngine(target["port"], target["file"])
    launcher = Launcher(**options)
    folder = Path(asked["train"]["folder"])
    if asked["how"] == "run":
        note(folder / "submitted", "")
        value = launcher.run(train, **asked["train"])
    else:
        handle = launcher.submit(train, **asked["train"])
        note(folder / "submitted", "")
        value = handle.result()
        handle.mark_delivered()
    print(json.dumps(value))


if __name__ == "__main__":
    main()
