.PHONY: demo test setup lint types unit bench faults soak test-airflow-oldest test-dagster-oldest reference clean

# The digits pipelines, whole, in Airflow and in Dagster, on embedded Spark.
demo: setup
	.venv/bin/python scripts/demo.py

# Lint, types and the whole test suite.
test: lint types unit

setup:
	./scripts/setup.sh

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: setup
	.venv/bin/mypy

unit: setup
	.venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# Side by side with TorchDistributor, torchrun, Ray Train (where it installs) and the floor: benchmarks/results.md,
# results.json, docs/launch.svg.
# BENCH may name some of them, for example BENCH="launch logs".
bench: setup
	.venv/bin/python -m pip install --quiet --constraint $(LOCK) matplotlib
	.venv/bin/python -m pip install --quiet --constraint $(LOCK) "ray[train]==2.*" || true
	.venv/bin/python benchmarks/all.py $(BENCH)

# The tests that take too long for every change: the rest of the fault matrix, of two hosts, of the fuzzing.
faults: setup
	.venv/bin/python -m pytest -m soak

# Trainings, hurt at random for half an hour; FAULTS, MINUTES and SEED may be given.
soak: setup
	.venv/bin/python -m tests.faults.soak --faults $(or $(FAULTS),200) --minutes $(or $(MINUTES),30) \
		$(if $(SEED),--seed $(SEED))

# The tests that need no deployment, with the oldest supported version, in a venv of its own.
test-airflow-oldest:
	./scripts/test-oldest.sh airflow

test-dagster-oldest:
	./scripts/test-oldest.sh dagster

# docs/reference.md, from the docstrings.
reference: setup
	.venv/bin/python scripts/reference.py

clean:
	rm -rf .venv .venv-airflow-oldest .venv-dagster-oldest .demo .mypy_cache .pytest_cache .ruff_cache
