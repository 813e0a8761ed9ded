"""The workflows run commands that exist here, and actions that nobody can replace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_and_pinned_actions(workflow: Path) -> None:
    text = workflow.read_text()
    for job in yaml.safe_load(text)["jobs"].values():
        assert job["timeout-minutes"] <= 180
        chosen = job.get("strategy", {}).get("matrix", {}).get("target", [])
        made = [word for step in job["steps"] for word in re.findall(r"^make ([\w-]+)", step.get("run", ""))]
        assert {*chosen, *made} <= TARGETS
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in actions), actions
