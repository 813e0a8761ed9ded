"""``python -m rankzero.cli``."""

from rankzero.cli import main

main(prog_name="rankzero")
