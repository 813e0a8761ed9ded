"""`progress` shows how far a loop is."""

import time

import pytest

import rankzero.train as rt
from rankzero.train import context


def test_a_log_gets_lines_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_TIME_SCALE", "120")
    assert list(rt.progress(range(1000), "epoch 1")) == list(range(1000))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1: 1000/1000 (100%), ")


def test_time_left_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    list(rt.progress(iter("abcd"), total=4))
    assert "2/4 (50%), " in (out := capsys.readouterr().out)
    assert "s/it, " in out
    assert " left\n" in out


def test_an_unknown_length_and_other_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    list(rt.progress(iter(range(7))))
    assert capsys.readouterr().out.startswith("7, ")
    monkeypatch.setattr(context, "_session", context._Session(context.TrainContext(rank=1, world_size=2)))
    list(rt.progress(range(7)))
    assert capsys.readouterr().out == ""
