"""The page of all messages: each error that rankzero's own code raises, by its code. The site's build makes it.

A message is read out of the source, so that the page names the ones that no test provokes, too. ``...`` stands for the
parts that differ.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("core/rankzero", "airflow_provider/airflow_rankzero", "dagster_integration/dagster_rankzero")
ERRORS = "core/rankzero/errors.py"
ANY = "..."

TITLE = """# All messages

With this page you find a message that a log shows, and with it the type and the code of its error. `...` stands for the
parts that differ.
[Errors](errors.md) has the causes, and what to do, of those that users meet most.
"""


Values = dict[str, list[ast.expr]]
"""The expressions that are assigned to each name."""


@dataclass(frozen=True)
class Message:
    """One place in the source that makes an error."""

    code: str
    error: str
    text: str
    place: str

    @property
    def is_computed(self) -> bool:
        """True if the source has no word of the message, which Spark or an earlier error gives."""
        return not re.search(r"\w", self.text)


def collect(root: Path = ROOT) -> list[Message]:
    """Returns the messages of all errors of `errors.py` that the packages make, ordered by code and text."""
    codes = _codes(ast.parse((root / ERRORS).read_text()))
    found = set()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            for call, error, values in _calls(ast.parse(path.read_text()), codes):
                own = [key.value for key in call.keywords if key.arg == "code" and isinstance(key.value, ast.Constant)]
                for text in sorted(_texts(call.args[0], values)):
                    place = f"{path.relative_to(root).as_posix()}:{call.lineno}"
                    found.add(Message(str(own[0].value) if own else codes[error], error, _tidy(text), place))
    return sorted(found, key=lambda message: (message.code, message.text, message.place))


def page(messages: list[Message]) -> str:
    """Returns the page: a section for each type of error, and a list of messages for each of its codes."""
    sections: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for message in messages:
        if message.is_computed:
            continue
        sections[message.error][message.code].add(message.text)
    lines = [TITLE]
    for error, by_code in sorted(sections.items(), key=lambda section: min(section[1])):
        lines.append(f"## {error}\n")
        for code, texts in sorted(by_code.items()):
            lines.append(f"[`{code}`](errors.md#{code.lower()})\n")
            lines.append("```text\n" + "\n".join(sorted(texts)) + "\n```\n")
    return "\n".join(lines)


def _codes(tree: ast.Module) -> dict[str, str]:
    """Returns the code of each class of errors."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: value.value
        for node in classes
        for value in _assigned(node).get("code", [])
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def _calls(tree: ast.Module, errors: dict[str, str]) -> Iterator[tuple[ast.Call, str, Values]]:
    """Yields the calls that make an error, its type, and what the names around it are assigned."""
    assigned = functools.cache(_assigned)
    waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, (tree,))]
    while waiting:
        node, scopes = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scopes = (*scopes, node)
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in errors:
                yield node, name, {key: value for scope in scopes for key, value in assigned(scope).items()}
        waiting += [(child, scopes) for child in ast.iter_child_nodes(node)]


def _assigned(scope: ast.AST) -> Values:
    found: Values = defaultdict(list)
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id].append(node.value)
    return found


def _texts(node: ast.expr, values: Values, depth: int = 3) -> set[str]:
    """Returns the texts that an expression can have."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.JoinedStr):
        return _joined(list(node.values), values, depth)
    if isinstance(node, ast.FormattedValue):
        return {ANY}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([node.left, node.right], values, depth)
    if isinstance(node, ast.IfExp):
        return _texts(node.body, values, depth) | _texts(node.orelse, values, depth)
    if isinstance(node, ast.Name) and node.id in values and depth:
        return set().union(*(_texts(value, values, depth - 1) for value in values[node.id]))
    return {ANY}


def _joined(parts: list[ast.expr], values: Values, depth: int) -> set[str]:
    texts = {""}
    for part in parts:
        texts = {text + more for text in texts for more in _texts(part, values, depth)}
    return texts


def _tidy(text: str) -> str:
    return re.sub(r"(\.\.\.\s*){2,}", "... ", re.sub(r"\s*\n\s*", " ", text)).strip()


if __name__ == "__main__":
    print(page(collect()))
