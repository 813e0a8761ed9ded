"""Draws docs/images/terminal.svg: the training of docs/README.md in a terminal of 80 columns, and what came of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = DOCS / "images" / "terminal.svg"
COLUMNS = 80
COMMANDS = ("rankzero run -n 2 --run-id first train.py", "rankzero runs runs")


def shown(command: str, folder: str) -> str:
    """What a command writes to a terminal of its own, as it looks at its end."""
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "RANKZERO_STORE": f"{folder}/runs"}
    line = [sys.executable, "-m", "rankzero.cli", *command.split()[1:]]
    process = subprocess.Popen(line, cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    pieces = []
    try:
        while piece := os.read(master, 65536):
            pieces.append(piece)
    except OSError:
        # The other end is closed: the command has ended.
        pass
    process.wait()
    os.close(master)
    return last_look(b"".join(pieces).decode(errors="replace"))


def last_look(text: str) -> str:
    """What is on the screen in the end: lines of progress are written over."""
    lines, row, is_over = [""], 0, False
    for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\n":
            row, is_over = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            is_over = True
        elif up := re.fullmatch(r"\x1b\[(\d*)A", token):
            row = max(0, row - int(up[1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.endswith("m") or not token.startswith("\x1b"):
            lines[row] = token if is_over else lines[row] + token
            is_over = False
    return "\n".join(lines).rstrip()


def main() -> None:
    """Trains, and draws."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    example = re.search(r"```python\n(.*?)```", (DOCS / "README.md").read_text(), re.S)
    assert example
    script = example[1].partition("\n\nif __name__")[0] + "\n\nimport rankzero.train as rt\nrt.set_result(train(0.1))\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "green"), command))
            console.print(Text.from_ansi(shown(command, folder).replace(folder, "~/project")))
    # Its fonts would come from the web.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="rankzero"), flags=re.S)
    PICTURE.write_text(picture)
    print(PICTURE)


if __name__ == "__main__":
    main()
