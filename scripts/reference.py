"""Writes what is derived from the code: python scripts/reference.py [--check | --pages].

Lines of two modules, which type checkers need, come from the table of options: the arguments of Airflow's operator, and
the fields of Dagster's resource. ``--pages`` prints the pages of the reference as JSON, by their file names: the build
of the site makes them from the public names and their docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_overloads

ROOT = Path(__file__).parent.parent

PACKAGES = {
    "rankzero": "start trainings, follow runs, open results and catch errors",
    "rankzero.train": "call rankzero from inside a training function: `import rankzero.train as rt`",
    "rankzero.sweep": "give `Launcher.map` its trials, and read what it returns",
    "rankzero.tracking": "send the events of a run to other systems: `Launcher(trackers=[...])`",
    "rankzero.testing": "test trainings and the pipelines around them",
    "rankzero.pipeline": "connect another orchestrator",
    "airflow_rankzero": "train in a task of Airflow",
    "dagster_rankzero": "train in an asset or op of Dagster",
}
"""The public modules, and what their users do with them."""

LINE = 100
"""Characters from which a signature is broken."""

_OURS = ("rankzero", "airflow_rankzero", "dagster_rankzero")

_MADE_BY_US = {"Checkpoint", "PreparedDataLoader", "RunHandle", "TrainContext"}
"""Classes whose objects users get and do not make."""

_TITLES = {"Args": "Arguments"}

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):$")
_ENTRY = re.compile(r"([\w.]+): ")
_MODULE = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")
"""What comes before a class of another package, which `inspect` shows."""
_MARKUP = re.compile(r"``([^`]+)``")
_PAGE = re.compile(r"\bdocs/([a-z-]+\.md#[a-z-]+)")
"""Another page, as a docstring names it."""


def pages() -> dict[str, str]:
    """Returns the pages of the reference, by their file names."""
    return {f"{name}.md": page(name, purpose) for name, purpose in PACKAGES.items()}


def page(name: str, purpose: str) -> str:
    """Returns the page of a module."""
    parts = [f"# `{name}`", "", f"With the names on this page you {purpose}.", ""]
    module = importlib.import_module(name)
    for each in sorted(module.__all__, key=str.lower):
        value = getattr(module, each)
        if callable(value):
            parts += describe(each, value)
        else:
            # A module or a constant of the interface for orchestrators.
            shown = str(inspect.getdoc(value)).partition("\n\n")[0] if inspect.ismodule(value) else f"`{value!r}`"
            parts += [f"## `{each}`", "", shown, ""]
    return "\n".join(parts).rstrip() + "\n"


def describe(name: str, value: Any) -> list[str]:
    """The entry of one public name."""
    parts = [f"## `{name}`", ""]
    if inspect.isclass(value) and issubclass(value, BaseException):
        bases = [base.__name__ for base in value.__bases__ if base.__module__.startswith("rankzero")]
        parts += [f"A kind of `{bases[0]}`.", ""] if bases else []
    else:
        parts += signatures(name, value)
    parts += text(inspect.getdoc(value))
    parts += settings(value)
    for member_name, member in members(value) if inspect.isclass(value) else []:
        parts += [f"### `{name}.{member_name}`", ""]
        if not isinstance(member, property):
            parts += signatures(member_name, _function_of(member))
        parts += text(inspect.getdoc(member))
    return parts


def members(cls: type) -> list[tuple[str, Any]]:
    """The methods and properties that a class of ours adds to those of its framework or of `Launcher`, in its order."""
    foreign = [base for base in cls.__mro__ if not base.__module__.startswith(_OURS)]
    foreign += [base for base in cls.__mro__[1:] if base.__name__ in importlib.import_module("rankzero").__all__]
    found = {}
    ours = [base for base in cls.__mro__ if base not in foreign]
    for base in [cls] if issubclass(cls, BaseException) else reversed(ours):
        for name, member in vars(base).items():
            is_called = isinstance(member, property) or inspect.isfunction(_function_of(member))
            if is_called and not name.startswith("_") and not any(hasattr(other, name) for other in foreign):
                found[name] = member
    return list(found.items())


def _function_of(member: Any) -> Any:
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def settings(value: Any) -> list[str]:
    """The fields of a pydantic model; nothing for anything else."""
    fields = getattr(value, "model_fields", {})
    lines = [f"* `{name}`: {field.description}" for name, field in fields.items() if field.description]
    return [*lines, ""] if fields else []


class _Raw:
    """Text that a signature shows as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def signatures(name: str, value: Any) -> list[str]:
    """How it is called: in every way, if it has several."""
    if name in _MADE_BY_US:
        return []
    ways = get_overloads(value) if inspect.isfunction(value) else []
    return ["```python", *(signature(name, way) for way in ways or [value]), "```", ""]


def signature(name: str, value: Any) -> str:
    """One way of calling it."""
    found = inspect.signature(value)
    parameters = [parameter for parameter in found.parameters.values() if parameter.name != "self"]
    shown = []
    for number, parameter in enumerate(parameters):
        # What is made when the module is imported shows an address.
        if repr(parameter.default).startswith("<") and parameter.default is not parameter.empty:
            parameter = parameter.replace(default=_Raw("..."))
        if get_origin(parameter.annotation) is Annotated:
            parameter = parameter.replace(annotation=get_args(parameter.annotation)[0])
        if isinstance(parameter.annotation, str):
            parameter = parameter.replace(annotation=_Raw(parameter.annotation))
        if number and parameters[number - 1].kind is parameter.POSITIONAL_ONLY is not parameter.kind:
            shown.append("/")
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword and not any(text.startswith("*") for text in shown):
            shown.append("*")
        shown.append(str(parameter))
    shown = [_MODULE.sub("", text) for text in shown]
    returned = f" -> {found.return_annotation}" if isinstance(found.return_annotation, str) else ""
    line = f"{name}({', '.join(shown)}){returned}"
    if len(line) > LINE:
        line = "\n".join([f"{name}(", *(f"    {parameter}," for parameter in shown), f"){returned}"])
    return line


def text(doc: str | None) -> list[str]:
    """A docstring of Google's style as Markdown."""
    lines, parts, section = (doc or "").splitlines(), [], ""
    for line in lines:
        stripped = line.strip()
        if heading := _SECTION.match(stripped):
            if section == "Example":
                parts.append("```")
            section = heading[1]
            parts += [f"**{_TITLES.get(section, section)}**", "", *(["```python"] if section == "Example" else [])]
        elif section == "Example":
            parts.append(line.removeprefix("    ").replace("  # doctest: +SKIP", "").rstrip())
        elif section and (entry := _ENTRY.match(stripped)) and line.startswith("    ") and line[4:5] != " ":
            parts.append(f"* `{entry[1]}`: {stripped[entry.end() :]}")
        elif section in ("", "Returns", "Yields"):
            parts.append(line.removeprefix("    ") if section else line)
        else:
            parts.append("  " + stripped if stripped else "")
    if section == "Example":
        while not parts[-1]:
            parts.pop()
        parts.append("```")
    return [part if part.startswith((">>>", "...")) else _linked(_MARKUP.sub(r"`\1`", part)) for part in parts] + [""]


def _linked(line: str) -> str:
    return _PAGE.sub(r"[\1](../\1)", line)


BEGIN, END = "# Options of a run, made by `make reference`:\n", "# The end of these options.\n"


def with_options(name: str, lines: Iterable[str]) -> str:
    """A module with a line for each option between its two marks."""
    before, _, rest = (ROOT / name).read_text().partition(BEGIN)
    indent = before.rpartition("\n")[2]
    return before + BEGIN + "".join(f"{indent}{line}\n" for line in lines) + indent + END + rest.partition(END)[2]


TYPES = {
    "NumProcesses": "int | tuple[int, int]",
    "RestartOn": "str | type[BaseException] | Callable[[BaseException], Any] | Sequence[Any]",
}
"""Types of core as the operator writes them; a text may be ``"auto"``, too."""


def arguments(name: str) -> str:
    """The module with the operator's arguments: a number may be a text that is rendered to one."""
    from airflow_rankzero.xcom import OPTIONS

    lines = []
    for each, option in OPTIONS.items():
        types = [TYPES.get(kind, kind) for kind in option.type.split(" | ") if kind != "None"]
        types += ["str"] if option.is_number else []
        types += ["None"] if option.default is None or "None" in option.type else []
        default = json.dumps(option.default) if isinstance(option.default, str) else repr(option.default)
        lines.append(f"{each}: {' | '.join(types)} = {default},")
    return with_options(name, lines)


def fields(name: str) -> str:
    """The module with the resource's fields: the options that one plain type can hold."""
    from dagster_rankzero.resource import OPTIONS, option_field

    lines = []
    for each, option in OPTIONS.items():
        if plain := option.kind.plain:
            default = option_field(each).default
            optional = default is None or (option.default is not None and "None" in option.type)
            kind = f"{plain if get_origin(plain) else plain.__name__}{' | None' if optional else ''}"
            lines.append(f'{each}: {kind} = option_field("{each}")')
    return with_options(name, lines)


FILES = {
    "airflow_provider/airflow_rankzero/operators.py": arguments,
    "dagster_integration/dagster_rankzero/resource.py": fields,
}
"""What makes each file."""


def main() -> None:
    """Writes the files, or with ``--check`` names the first that is not what the code says; ``--pages`` prints all."""
    if "--pages" in sys.argv[1:]:
        json.dump(pages(), sys.stdout)
        if "--check" not in sys.argv[1:]:
            return
    for name, make in FILES.items():
        path, made = ROOT / name, make(name)
        if path.read_text() == made:
            continue
        if "--check" in sys.argv[1:]:
            sys.exit(f"{path.name} is not what the code says: make reference")
        path.write_text(made)


if __name__ == "__main__":
    main()
