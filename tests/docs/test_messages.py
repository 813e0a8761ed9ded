"""The page of all messages, which the site's build reads out of the source."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.conftest import ROOT

COMPUTED = {
    "core/rankzero/driver/ending.py",
    "core/rankzero/driver/recorder.py",
    "core/rankzero/driver/watch.py",
    "core/rankzero/engines/local.py",
    "core/rankzero/engines/spark/errors.py",
    "core/rankzero/engines/spark/submit.py",
    "core/rankzero/run/observer.py",
    "core/rankzero/values/formats.py",
    "dagster_integration/dagster_rankzero/io_manager/manifest.py",
}
"""Modules that make an error of the text of another one: of Spark, of a rank, of a store."""


@pytest.fixture(scope="module")
def messages() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("messages")


@pytest.fixture(scope="module")
def found(messages: ModuleType) -> list[Any]:
    return list(messages.collect())


def test_each_error_has_words_in_the_source(found: list[Any]) -> None:
    assert {message.place.partition(":")[0] for message in found if message.is_computed} <= COMPUTED
    assert len({message.text for message in found}) > 300


def test_the_page_has_each_message_below_its_code(messages: ModuleType, found: list[Any]) -> None:
    sections = {section.splitlines()[0]: section for section in messages.page(found).split("\n## ")[1:]}
    for message in found:
        if not message.is_computed:
            _, _, of_code = sections[message.error].partition(f"[`{message.code}`]")
            assert f"\n{message.text}\n" in of_code, message
