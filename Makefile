.PHONY: demo test test-fast durations setup lint types unit bench faults crash-points test-matrix test-python test-frameworks locks reference docs release clean

LOCK = constraints/$(shell .venv/bin/python -c 'import sys; print("{}.{}".format(*sys.version_info))').txt

# The digits pipelines, whole, in Airflow and in Dagster, on embedded Spark.
demo: setup
	.venv/bin/python scripts/demo.py

# Lint, types and the test suite; `make faults` has its slow variants.
test: lint types unit

setup:
	./scripts/setup.sh

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/python scripts/check_prose.py
	.venv/bin/python scripts/measure_house.py --check
	.venv/bin/python scripts/check_api.py
	.venv/bin/python scripts/reference.py --check

types: setup
	.venv/bin/mypy

# More processes than cores: half of the suite's time is waiting for processes that start, train and end.
unit: setup
	.venv/bin/python -m pytest -n 5

# Lint, types, and the tests that start no JVM and no deployment.
test-fast: lint types
	.venv/bin/python -m pytest -n 2 --fast

# tests/durations.json, by which the longest files come first and the fast ones are known.
durations: setup
	.venv/bin/python -m pytest -n 5 --measure

# Side by side with TorchDistributor, torchrun, Ray Train (where it installs) and the floor: benchmarks/results.md,
# results.json.
# BENCH may name some of them, for example BENCH="launch logs".
bench: setup
	.venv/bin/python -m pip install --quiet --constraint $(LOCK) "ray[train]==2.*" || true
	.venv/bin/python benchmarks/all.py $(BENCH)

# What `make test` leaves out: each behaviour with other engines, stores, sizes and faults. Runs every night.
faults: setup
	.venv/bin/python -m pytest -m soak

# Kills a process at each operation of each scenario: POINTS="--scenario run --sample 100", POINTS="--store s3"; or answers
# requests to an S3 server wrongly: POINTS="--answers".
crash-points: setup
	.venv/bin/python -m tests.faults.crash $(POINTS)

# The tests that need no deployment, with other versions of Airflow, Dagster, Spark and torch, in venvs of their own;
# ROWS may name some: ROWS="airflow-3.1.0 torch-2.4.0".
test-matrix: setup
	.venv/bin/python scripts/test_matrix.py $(ROWS)

# The suite with another Python, in a venv of its own: make test-python PYTHON=3.13. TESTS may name files.
# Of the PATH, since Spark's workers are its python3 where nobody names one.
test-python:
	PYTHON=$(PYTHON) VENV=.venv-$(PYTHON) ./scripts/setup.sh
	PATH="$(CURDIR)/.venv-$(PYTHON)/bin:$$PATH" .venv-$(PYTHON)/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(TESTS)

# constraints/3.12.txt and 3.13.txt, from 3.11.txt.
locks: setup
	./scripts/lock.sh

# Lightning, Hugging Face, Accelerate, DeepSpeed and torchdata in ranks, a notebook's kernel, Delta tables, OpenLineage,
# MLflow with its server, and TensorBoard: they are installed beside .venv, not into it.
# By the name of the folder the launcher knows that they are installed, and do not travel.
FRAMEWORKS = $(CURDIR)/.frameworks/site-packages
test-frameworks: setup
	.venv/bin/python -m pip install --quiet --constraint $(LOCK) --target $(FRAMEWORKS) \
		lightning transformers accelerate torchdata optuna ipykernel nbclient deltalake
	.venv/bin/python -m pip install --quiet --target .frameworks/build setuptools wheel
	PYTHONPATH=.frameworks/build DS_BUILD_OPS=0 .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		--target $(FRAMEWORKS) deepspeed einops hjson msgpack ninja py-cpuinfo
	.venv/bin/python -m pip install --quiet --target .frameworks/tracking/site-packages "mlflow==3.*" tensorboard
	rm -rf $(FRAMEWORKS)/torch $(FRAMEWORKS)/torch-* $(FRAMEWORKS)/numpy $(FRAMEWORKS)/numpy-*
	PYTHONPATH=$(FRAMEWORKS) .venv/bin/python -m pytest tests/doors/frameworks
	.venv/bin/python -m pip install --quiet --no-deps --target .frameworks/openlineage httpx2 httpcore2 \
		apache-airflow-providers-openlineage openlineage-python openlineage-sql openlineage-integration-common
	PYTHONPATH=.frameworks/openlineage .venv/bin/python -m pytest tests/airflow/test_lineage.py

# The lines that type checkers need, from the table of options.
reference: setup
	.venv/bin/python scripts/reference.py

# The site of docs/: .site/index.html, which loads nothing from the web. Its generator has a venv and a lock of
# its own, and .venv makes the reference; a link, an anchor or a page that leads nowhere is an error.
docs: setup .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

.venv-docs/installed: constraints/docs.txt
	$(or $(PYTHON),python3) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints/docs.txt
	touch $@

# A rehearsal: wheel and sdist in dist/, built twice with the same bytes and checked, a list of their parts (SBOM), each extra
# installed alone, and the site. Uploads nothing.
release: docs .venv-release/installed
	.venv-release/bin/python scripts/release.py
	.venv/bin/python -m pytest -m "soak or not soak" tests/docs/packaging

.venv-release/installed: constraints/release.txt
	$(or $(PYTHON),python3) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints/release.txt
	touch $@

clean:
	rm -rf .site dist .venv .venv-docs .venv-release .venv-3.* .venv-matrix .frameworks .demo .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
