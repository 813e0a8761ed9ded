"""Counts docstrings that do not stand alone, and words that only this project would use; fails above the limits.

``make lint`` runs it. ``--list`` prints every finding, ``--list PATH ...`` those of some files or folders.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

CODE = ("core", "airflow_provider", "dagster_integration", "example_dags")
"""Folders whose docstrings, comments and messages are read."""

LIMITS = {"anaphor": 0, "short": 0, "private word": 12}
"""The most findings of each kind. A limit only ever falls."""

ANAPHOR = re.compile(
    r"(What|Of|As|That|Those|There|Where|One|Its|For|Nothing|Always|Who|Whose|How|Which|It|They|The same|This|These"
    r"|Until|With|So|And|But|Or|If|Where|From|By|In)\b"
)
"""Beginnings of a docstring that is an answer to something else."""

SHORT = 3
"""Words of a docstring that is too short to be a sentence."""

LONGEST = 20
"""Words that the sentences of a page may have on average."""

PRIVATE = re.compile(
    r"\b(whoever|whomever|somebody|nobody|the other one|farewells?|goodbyes?|for ?ever|but for|heirs?|succession"
    r"|mends?|mended|anew|of ours|of its own accord|shall|as it was|no more than that|at once|echo of"
    r"|hands? over|handed over|takes? up|taken up|takes? over|taken over|patience|in words|is to end|are to end"
    r"|it goes on|went on|goes on|gone on|go on|hears?|heard)\b",
    re.IGNORECASE,
)
"""Words for which the field has others: see the voice of the project in CONTRIBUTING."""


def docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the name and the first paragraph of each docstring of functions and classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, node.name, text.split("\n\n")[0]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of each string and comment of a Python file, or each line of a page."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def findings(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields the kind, the line and the text of everything in a file that is against the voice of the project."""
    if path.suffix == ".py":
        for line, name, text in docstrings(path):
            if ANAPHOR.match(text):
                yield "anaphor", line, f"{name}: {text}"
            elif len(text.split()) <= SHORT:
                yield "short", line, f"{name}: {text}"
    for line, text in prose(path):
        for match in PRIVATE.finditer(text):
            yield "private word", line, f"{match[0]}: {text.strip()}"


def words_of_a_sentence(path: Path) -> float:
    """Returns the average number of words of the sentences on a page, without its code, tables and headings."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S)
    text = re.sub(r"^[|#].*$|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    paragraphs = re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text)
    sentences = [part for each in paragraphs for part in re.split(r"(?<=[.!?])\s|; ", " ".join(each.split()))]
    counts = [len(sentence.split()) for sentence in sentences if len(sentence.split()) > 2]
    return sum(counts) / len(counts) if counts else 0.0


def main(arguments: list[str]) -> int:
    """Prints the counts, or the findings where asked to; returns 1 if a count is above its limit."""
    listing, chosen = "--list" in arguments, [ROOT / each for each in arguments if each != "--list"]
    roots = chosen or [*(ROOT / folder for folder in CODE), ROOT / "docs", *ROOT.glob("*.md")]
    files = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    counts = dict.fromkeys(LIMITS, 0)
    for path in files:
        if path.suffix in (".py", ".md"):
            for kind, line, text in findings(path):
                counts[kind] += 1
                if listing:
                    print(f"{path.relative_to(ROOT)}:{line}: {kind}: {' '.join(text.split())[:160]}")
    pages = [path for path in files if path.suffix == ".md" and path.name != "CHANGELOG.md"]
    long = {path: words for path in pages if (words := words_of_a_sentence(path)) > LONGEST}
    for path, words in long.items():
        print(f"{path.relative_to(ROOT)}: its sentences have {words:.1f} words, and may have {LONGEST}")
    print("prose:", ", ".join(f"{count} of at most {LIMITS[kind]} {kind}" for kind, count in counts.items()))
    return int(bool(long) or any(count > LIMITS[kind] for kind, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
