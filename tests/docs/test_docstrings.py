"""What the docstrings of the core show is true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.docstrings import modules_with_examples, run_examples


@pytest.mark.parametrize("name", modules_with_examples(ROOT / "core" / "rankzero"))
def test_the_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some write files beside them.
    monkeypatch.chdir(tmp_path)
    run_examples(name)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        # Else other tests of this process would have a group, too.
        dist.destroy_process_group()
