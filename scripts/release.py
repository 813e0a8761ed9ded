"""Rehearses a release: builds wheel and sdist twice, compares their bytes, checks them, and prints their checksums.

``make release`` runs it in an environment of its own, with the tools that constraints/release.txt locks. It uploads
nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
SBOM = DIST / "sbom.cdx.json"


def run(*command: str, **env: str) -> None:
    """Runs a Python module of this environment. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env={**os.environ, **env})


def build(folder: Path) -> dict[str, str]:
    """Builds wheel and sdist into a folder, and returns the sha256 of each by its name."""
    shutil.rmtree(folder, ignore_errors=True)
    commit = ["git", "log", "-1", "--format=%ct"]
    time = subprocess.run(commit, check=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    run("build", "--no-isolation", "--outdir", str(folder), SOURCE_DATE_EPOCH=time)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> None:
    """Builds and checks the files of a release."""
    again = DIST / "again"
    built = build(DIST)
    if (other := build(again)) != built:
        sys.exit(f"release: two builds of one commit differ: {built} and {other}")
    shutil.rmtree(again)
    files = [str(DIST / name) for name in built]
    run("twine", "check", "--strict", *files)
    run("check_wheel_contents", *(file for file in files if file.endswith(".whl")))
    run("cyclonedx_py", "requirements", "constraints/3.11.txt", "--pyproject", "pyproject.toml", "-o", str(SBOM))
    print("would be uploaded:")
    for name, digest in built.items():
        print(f"  {digest}  {(DIST / name).stat().st_size:>9}  {name}")


if __name__ == "__main__":
    main()
