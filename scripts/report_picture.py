"""Draws docs/images/report.png: the report of a training that lost a rank, in headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from rankzero import Launcher

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "report.png"


def train() -> float:
    """Something to look at: two curves, checkpoints, one rank that is killed, one that is slow."""
    import math
    import os
    import signal
    import time

    import torch

    import rankzero.train as rt

    context, checkpoint = rt.get_context(), rt.get_checkpoint()
    first = int(checkpoint.load()["step"]) + 1 if checkpoint else 0
    for step in range(first, 160):
        time.sleep(0.05 if context.rank != 3 else 0.07)
        noise = torch.rand(1).item() * 0.06
        state = {"step": step, "weight": torch.ones(10_000)} if step % 40 == 39 else None
        rt.report({"step": step, "loss": math.exp(-step / 40) + noise, "accuracy": 1 - math.exp(-step / 50)}, state)
        if step % 20 == 0:
            print(f"step {step}: loss {math.exp(-step / 40) + noise:.4f}")
        if context.attempt == 0 and (context.rank, step) == (1, 60):
            os.kill(os.getpid(), signal.SIGKILL)
    return 0.05


def main() -> None:
    """Trains, and photographs the page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium here: `apt-get install chromium`")
    with tempfile.TemporaryDirectory() as store:
        Launcher(4, store=store, run_id="digits-2026-11-23", max_restarts=1).run(train)
        page = Path(store, "digits-2026-11-23", "report.html")
        size = ["--window-size=1180,1000", "--hide-scrollbars", "--virtual-time-budget=3000"]
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                *size,
                f"--screenshot={PICTURE}",
                f"file://{page}",
            ],
            check=True,
            capture_output=True,
        )
    print(PICTURE)


if __name__ == "__main__":
    main()
