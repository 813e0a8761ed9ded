"""docs/errors.md: an entry for every public error, each with a message that was provoked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.docs.pages import anchors
from tests.docs.provocations import PROVOCATIONS, SLOW

import rankzero
from rankzero import Launcher, RankZeroError
from rankzero.compat.horovod.torch import errors as horovod

PAGE = "docs/errors.md"

OURS = [value for name in rankzero.__all__ if isinstance(value := getattr(rankzero, name), type)]
ERRORS = [cls for cls in OURS if issubclass(cls, RankZeroError) and cls is not RankZeroError]
ERRORS += [value for value in vars(horovod).values() if isinstance(value, type)]


def entries() -> dict[str, tuple[str, str, str]]:
    """The error's name, its code and the message of each entry, by its anchor."""
    found = {}
    for section in re.split(r"^## ", (ROOT / PAGE).read_text(), flags=re.M)[1:]:
        name = section.splitlines()[0]
        of_section = re.match(r".*\n\n<a id=.*?></a>`(RZ-\d{4})`\n", section)
        for entry in re.split(r"^### ", section, flags=re.M)[1:]:
            message = re.search(r"^```text\n(.*?)\n```$", entry, re.M | re.S)
            assert message, entry
            assert entry[message.end() :].strip(), f"no cause in {entry}"
            code = re.match(r".*\n\n(?:<a id=.*?></a>)?`(RZ-\d{4})`\n", entry) or of_section
            found[entry.splitlines()[0].lower().replace(" ", "-")] = (name, code[1] if code else "", message[1])
    return found


def pattern(message: str) -> str:
    """A message of the page as a regular expression: ``...`` stands for anything."""
    return ".*".join(re.escape(part) for part in message.split("..."))


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_has_a_section_to_which_its_docstring_leads(cls: type) -> None:
    anchor = cls.__name__.lower()
    assert anchor in anchors(PAGE)
    assert f"{PAGE}#{anchor}" in (cls.__doc__ or "")


def test_every_entry_can_be_provoked() -> None:
    assert sorted(entries()) == sorted(PROVOCATIONS)


@pytest.mark.parametrize(
    "anchor", [pytest.param(name, marks=pytest.mark.soak) if name in SLOW else name for name in sorted(PROVOCATIONS)]
)
def test_the_message_is_the_one_on_the_page(
    anchor: str, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, code, message = entries()[anchor]
    with pytest.raises(Exception) as raised:
        PROVOCATIONS[anchor](launcher, tmp_path)
    assert re.fullmatch(pattern(message), str(raised.value), re.S), raised.value
    shown = "WorkerFailedError" if name == "RetryableError" else name
    assert type(raised.value).__name__ == shown
    if isinstance(raised.value, RankZeroError) and name != "RetryableError":
        assert raised.value.code == code


def test_each_code_of_an_error_is_an_anchor_of_the_page() -> None:
    used = {code for path in (ROOT / "core").rglob("*.py") for code in re.findall(r'"(RZ-\d{4})"', path.read_text())}
    assert {code.lower() for code in used - {RankZeroError.code}} == {
        anchor for anchor in anchors(PAGE) if anchor.startswith("rz-")
    }
