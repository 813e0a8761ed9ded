#!/usr/bin/env bash
# The Airflow tests that need no scheduler, with the oldest Airflow that pyproject.toml allows, in a venv of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=3.3.0
venv=.venv-airflow-oldest
[ -x $venv/bin/python ] || python3.11 -m venv $venv
# Everything else as in the lock; Airflow's own parts belong to its version.
grep -v '^apache-airflow' constraints.txt > $venv/constraints.txt
$venv/bin/python -m pip install --quiet --disable-pip-version-check -c $venv/constraints.txt \
  "apache-airflow==$oldest" numpy pandas psutil pytest pytest-timeout safetensors scikit-learn mypy hatchling editables
$venv/bin/python -m pip install --quiet --disable-pip-version-check -c $venv/constraints.txt \
  --no-build-isolation -e ".[spark,torch]"
exec $venv/bin/python -m pytest -p no:cacheprovider \
  tests/airflow/test_operator.py tests/airflow/test_trigger.py tests/airflow/test_links.py \
  tests/airflow/test_provider.py tests/airflow/test_connection.py tests/airflow/test_tries.py
