"""Shared parts: the resource on this machine without Spark, and a store for assets."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from tests.handlers import restore_signal_handlers, signal_handlers

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource


@pytest.fixture(autouse=True, scope="session")
def migrations_read_once() -> Iterator[None]:
    """Keeps Dagster's migrations: each storage of each instance imports all 89 files again to find the newest one.

    These imports were two fifths of the processor time of tests that run a job in this process.
    """
    from alembic.script import ScriptDirectory

    read, known = ScriptDirectory.from_config, {}

    def from_config(config: Any) -> ScriptDirectory:
        source = (config.config_file_name, config.get_main_option("script_location"))
        if source not in known:
            known[source] = read(config)
        return known[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", from_config)
        yield


@pytest.fixture(autouse=True)
def dagsters_signal_handlers(same_signal_handlers: None) -> Iterator[None]:
    """A run that Dagster executes in this process leaves SIGTERM with whatever SIGINT has.

    That is `dagster._utils.interrupts.capture_interrupts`; in a shell's background job it means: ignored.
    """
    before = signal_handlers()
    yield
    restore_signal_handlers({**signal_handlers(), "SIGTERM": before["SIGTERM"]})


@pytest.fixture(autouse=True)
def dagster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An instance of its own for every test, without telemetry."""
    home = tmp_path / "dagster-home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    return home


@pytest.fixture
def torch_distributor(tmp_path: Path, marker: str) -> TorchDistributorResource:
    """Two ranks, as processes of this machine."""
    return TorchDistributorResource(
        engine="local", num_processes=2, store=str(tmp_path / "runs"), env={"MARK": marker}, start_timeout=240
    )


@pytest.fixture
def assets_path(tmp_path: Path) -> Path:
    """Where the IO manager stores."""
    return tmp_path / "assets"


@pytest.fixture
def resources(torch_distributor: TorchDistributorResource, assets_path: Path) -> dict[str, object]:
    """What most pipelines here are run with: one rank, where the number does not matter."""
    return {
        "torch_distributor": torch_distributor.options(num_processes=1),
        "io_manager": RankZeroIOManager(base_path=os.fspath(assets_path)),
    }


@pytest.fixture
def asset_context() -> Iterator[dg.AssetExecutionContext]:
    """The context of an asset that is called directly."""
    with dg.build_asset_context() as context:
        yield context


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """An instance in memory, for tests that make several runs."""
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


@pytest.fixture(autouse=True, scope="session")
def no_resource_tracker(suite_marker: str) -> Iterator[None]:
    """Ends the process that watches the semaphores of the multiprocess executor, where that was used here."""
    yield
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._stop()
