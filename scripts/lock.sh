#!/usr/bin/env bash
# constraints/3.12.txt and 3.13.txt: the versions of constraints/3.11.txt, and what these Pythons need beside them.
# torch's CUDA libraries are in none of them: its wheel names their versions, and a CPU build has none.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=$(command -v uv || echo .venv/bin/uv)
for version in 3.12 3.13; do
  lock=constraints/$version.txt
  "$uv" pip compile --quiet --no-header --no-annotate --python-version "$version" --extra dev \
    --constraint constraints/3.11.txt --output-file "$lock" pyproject.toml
  sed -Ei '/^(nvidia|cuda|triton)/d' "$lock"
done
