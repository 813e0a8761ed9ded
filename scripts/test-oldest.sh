#!/usr/bin/env bash
# The tests of one orchestrator that need no deployment, with its oldest version that pyproject.toml allows, in a venv
# of its own: scripts/test-oldest.sh airflow | dagster
set -euo pipefail
cd "$(dirname "$0")/.."

case "$1" in
  airflow)
    oldest="apache-airflow==3.3.0"
    tests=(operator trigger links provider connection tries delivery arguments templates outlets secrets config)
    ;;
  dagster)
    # Before it a partition key like "../x" could leave its asset's folder.
    oldest="dagster==1.13.6"
    tests=(dagster_asset dagster_multi_asset dagster_op dagster_resource dagster_stream dagster_failure dagster_step
      dagster_io_manager dagster_partitions dagster_checks dagster_metadata dagster_pipes dagster_imports
      dagster_fields dagster_output dagster_by_reference dagster_step_run)
    ;;
  *) echo "usage: $0 airflow | dagster" >&2; exit 2 ;;
esac
venv=.venv-$1-oldest
[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
# Everything else as in the lock; the orchestrator's own parts belong to its version (Airflow 3.3.0 wants aiosqlite < 0.22).
grep -v -e '^apache-airflow' -e '^dagster' -e '^aiosqlite' constraints.txt > "$venv/constraints.txt"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$venv/constraints.txt")
"${install[@]}" "$oldest" numpy pandas psutil pytest pytest-timeout safetensors scikit-learn mypy hatchling editables
"${install[@]}" --no-build-isolation -e ".[spark,torch]" universal-pathlib
files=()
for name in "${tests[@]}"; do files+=("tests/$1/test_$name.py"); done
exec "$venv/bin/python" -m pytest -p no:cacheprovider "${files[@]}"
