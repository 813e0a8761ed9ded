"""``python -m rankzero.cli``."""

from rankzero.cli import main

main()
