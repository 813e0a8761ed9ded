"""`RankZeroIOManager`: whole versions or none, verified when loaded."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import dagster as dg
import pytest
import torch
from tests.conftest import until
from tests.dagster.dagster_events import failure_of, metadata_of, retries_of
from upath import UPath

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset
from rankzero import ResultRef
from rankzero.pipeline import store as storage
from rankzero.store.upkeep import UNFINISHED_AFTER


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None


def asset_of(value: object) -> dg.AssetsDefinition:
    @dg.asset(name="stored")
    def stored():
        return value() if callable(value) else value

    return stored


@dataclass
class Shelf:
    """An IO manager, an instance, and the folder of the asset ``stored``."""

    manager: RankZeroIOManager
    instance: dg.DagsterInstance
    folder: Path

    def store(self, value: object) -> dict[str, object]:
        return metadata_of(self.run(asset_of(value)), "stored")

    def load(self, python_type: type | None = None) -> object:
        return self.defs(asset_of(None)).load_asset_value(
            "stored", python_type=python_type or object, instance=self.instance
        )

    def run(self, *assets: dg.AssetsDefinition, **more: object) -> dg.ExecuteInProcessResult:
        return dg.materialize(assets, resources={"io_manager": self.manager}, instance=self.instance, **more)

    def defs(self, *assets: dg.AssetsDefinition) -> dg.Definitions:
        return dg.Definitions(assets, resources={"io_manager": self.manager})

    def names(self, start: str = "") -> list[str]:
        """The files in the folder whose names begin with a text."""
        return [name for name in os.listdir(self.folder) if name.startswith(start)]


@pytest.fixture
def shelf(assets_path: Path, instance: dg.DagsterInstance) -> Shelf:
    return Shelf(RankZeroIOManager(base_path=str(assets_path)), instance, assets_path / "stored")


@pytest.mark.parametrize(
    ("value", "file_format"),
    [
        ({"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)}, "torch"),
        ({"accuracy": 0.5, "classes": ["a", None]}, "json"),
        (Point(3), "pickle"),
    ],
)
def test_values_come_back_as_they_were(shelf: Shelf, value: object, file_format: str) -> None:
    shown = shelf.store(lambda: value)
    (data,) = shelf.folder.glob("data-*")
    assert (shown["format"], shown["path"], shown["size"]) == (file_format, str(shelf.folder), data.stat().st_size)
    assert data.name.startswith(f"data-{shown['sha256'][:16]}-")
    loaded = shelf.load()
    if file_format == "torch":
        assert loaded.keys() == value.keys()
        assert all(torch.equal(loaded[key], value[key]) for key in value)
    else:
        assert type(loaded) is type(value)
        assert loaded == value


def test_without_a_path_the_instance_stores_beside_dagsters_own_io_manager(shelf: Shelf) -> None:
    assert dg.materialize([asset_of({"a": 0})], instance=shelf.instance).success
    there = replace(shelf, manager=RankZeroIOManager())
    assert str(there.store({"a": 1})["path"]).startswith(shelf.instance.storage_directory())
    assert there.load() == {"a": 1}
    assert dg.Definitions([asset_of(None)]).load_asset_value("stored", instance=shelf.instance) == {"a": 0}


def test_a_manifest_that_names_another_place_deletes_nothing(shelf: Shelf, tmp_path: Path) -> None:
    shelf.store(1)
    manifest = shelf.folder / "rankzero.json"
    victim = tmp_path / "victim"
    victim.mkdir()
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "previous": os.path.relpath(victim, manifest.parent)}))
    shelf.store(2)
    shelf.store(3)
    assert victim.exists()
    assert shelf.load() == 3


def test_a_torn_manifest_is_replaced(shelf: Shelf) -> None:
    shelf.store({"a": 1})
    manifest = shelf.folder / "rankzero.json"
    manifest.write_text(manifest.read_text()[:20])
    with pytest.raises(dg.Failure, match="damaged"):
        shelf.load()
    shelf.store({"a": 2})
    assert shelf.load() == {"a": 2}


@pytest.mark.parametrize("is_reference", [False, True])
def test_a_stored_version_survives_a_power_failure(
    shelf: Shelf, is_reference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = ResultRef.save({"a": 1}, tmp_path / "elsewhere") if is_reference else {"a": 1}
    # A handle is copied, as from another file system.
    monkeypatch.setattr(storage, "copy_within", lambda source, target: False)
    synced, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    shelf.store(value)
    files = list(shelf.folder.iterdir())
    assert len(files) == 2
    for path in (*files, shelf.folder, shelf.folder.parent):
        assert path.stat().st_ino in synced, path
    if is_reference:
        os.unlink(value.uri)
    assert shelf.load() == {"a": 1}


def test_a_flipped_bit_is_found_and_not_retried(shelf: Shelf) -> None:
    shelf.store({"w": torch.ones(100)})
    (data,) = shelf.folder.glob("data-*")
    damaged = bytearray(data.read_bytes())
    damaged[-7] ^= 1
    data.write_bytes(damaged)

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=2))
    def reader(stored: object) -> None: ...

    result = shelf.run(asset_of(None), reader, selection=[reader], raise_on_error=False)
    description, facts = failure_of(result, "reader")
    assert "sha256" in description
    assert facts["path"] == str(shelf.folder)
    assert retries_of(result, "reader") == 0


@pytest.mark.parametrize("dying_at", [pytest.param("data-", marks=pytest.mark.soak), "rankzero.json"])
def test_a_process_killed_while_storing_leaves_the_version_before(shelf: Shelf, dying_at: str) -> None:
    shelf.store({"version": 1})
    program = f"""
        import os, signal
        import dagster as dg
        from dagster_rankzero import RankZeroIOManager

        replace = os.replace

        def die(source, target, **options):
            if os.path.basename(target).startswith({dying_at!r}):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target, **options)

        os.replace = die

        @dg.asset
        def stored():
            return {{"version": 2}}

        dg.materialize([stored], resources={{"io_manager": RankZeroIOManager(base_path={str(shelf.folder.parent)!r})}})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert shelf.load() == {"version": 1}
    shelf.store({"version": 3})
    assert shelf.load() == {"version": 3}


def test_a_value_that_cannot_be_stored_leaves_the_version_before(shelf: Shelf) -> None:
    shelf.store({"version": 1})
    result = shelf.run(asset_of(threading.Lock), raise_on_error=False)
    assert "pickle" in failure_of(result, "stored")[0]
    assert shelf.load() == {"version": 1}


def test_superseded_versions_go_after_one_more(shelf: Shelf) -> None:
    refs = []
    for version in (1, 2, 2, 3):
        shelf.store({"version": version})
        refs.append(shelf.load(ResultRef))
    assert refs[2].load() == {"version": 2}
    assert refs[3].load() == {"version": 3}
    assert len(shelf.names("data-")) == 2


def test_a_version_that_a_training_reads_stays_until_it_has_ended(
    shelf: Shelf, torch_distributor: TorchDistributorResource, tmp_path: Path
) -> None:
    """Ranks are killed after three further versions; their next attempt opens the same file."""
    (began := tmp_path / "began").mkdir()
    may_end = tmp_path / "may-end"

    def train(stored: dict[str, torch.Tensor]) -> int:
        import rankzero.train as rt

        if (context := rt.get_context()).attempt == 0:
            (began / str(context.rank)).touch()
            while not may_end.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        return int(stored["version"])

    model = torch_asset(name="model", options={"max_restarts": 1})(train)
    resources = {"io_manager": shelf.manager, "torch_distributor": torch_distributor}

    def trained() -> dg.ExecuteInProcessResult:
        return dg.materialize([asset_of(0), model], selection="model", resources=resources, instance=shelf.instance)

    def store_version(number: int) -> None:
        shelf.store({"version": torch.tensor(number)})

    def versions() -> int:
        return len(shelf.names("data-"))

    store_version(1)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(trained)
        try:
            until(lambda: len(list(began.iterdir())) == 2, 120, "the ranks")
            for number in (2, 3, 4):
                store_version(number)
            assert versions() == 3
        finally:
            may_end.touch()
        result = outcome.result(120)
    assert result.success
    (value,) = (shelf.folder.parent / "model").glob("data-*")
    assert value.read_text() == "1"
    store_version(5)
    # The version that was held is a stray now, which goes after an hour.
    assert versions() == 3
    assert not shelf.names("held-")


def test_a_mark_of_a_run_that_cannot_be_read_keeps_its_version(shelf: Shelf) -> None:
    shelf.store({"version": 1})
    (first,) = shelf.folder.glob("data-*")
    (shelf.folder / f"held-{0:08x}-{first.name}").write_text("unknown://runs/one")
    for version in (2, 3):
        shelf.store({"version": version})
    assert first.exists()
    assert shelf.load() == {"version": 3}


def test_what_no_version_names_goes_after_an_hour(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.store({"version": 1})
    for name in ("killed__", "slow____"):
        (shelf.folder / f".writing-{name}").mkdir()
        (shelf.folder / f".writing-{name}" / "data").write_text("half of it")
    (shelf.folder / "data-0123456789abcdef-01234567.json").write_text("1")
    (shelf.folder / "notes").write_text("mine")
    # As Hugging Face's save_to_disk names its files, and as an asset below this one may be named.
    (shelf.folder / "data-00000-of-00001.arrow").write_text("mine")
    (shelf.folder / "data-0123456789abcdef-01234567.dir").mkdir()
    shelf.store({"version": 2})
    # Another process may write these now.
    assert (len(shelf.names("data-")), len(shelf.names(".writing-"))) == (5, 2)
    now, later = time.time, time.time() + 2 * UNFINISHED_AFTER()
    # A living process still writes this one.
    os.utime(shelf.folder / ".writing-slow____" / "data", (later, later))
    monkeypatch.setattr(time, "time", lambda: now() + 2 * UNFINISHED_AFTER())
    shelf.store({"version": 3})
    assert shelf.load() == {"version": 3}
    assert (len(shelf.names("data-")), shelf.names(".writing-")) == (4, [".writing-slow____"])
    assert {"notes", "data-00000-of-00001.arrow"} <= set(shelf.names())


def test_two_materializations_at_once_leave_a_complete_version(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 2):
        shelf.store({"version": version})
    upload, others = storage.upload, [3]

    def be_overtaken(path: str, target: str) -> None:
        upload(path, target)
        if others:
            # It retires the first version, which has the same content as the file that was just stored.
            shelf.store({"version": others.pop()})

    monkeypatch.setattr(storage, "upload", be_overtaken)
    shelf.store({"version": 1})
    assert shelf.load() == {"version": 1}


def test_a_handle_of_the_same_file_system_is_stored_without_reading_it(shelf: Shelf, tmp_path: Path) -> None:
    ref = ResultRef.save({"w": torch.ones(4)}, tmp_path / "elsewhere")
    for _ in range(2):
        shelf.store(ref)
        assert all(data.samefile(ref.uri) for data in shelf.folder.glob("data-*"))
    os.unlink(ref.uri)
    assert torch.equal(shelf.load()["w"], torch.ones(4))
    assert not shelf.names(".")


def test_a_torn_handle_is_not_stored(shelf: Shelf, tmp_path: Path) -> None:
    ref = ResultRef.save({"a": 1}, tmp_path / "elsewhere")
    Path(ref.uri).write_text('{"a"')
    with pytest.raises(dg.Failure, match="bytes"):
        shelf.store(ref)
    os.unlink(ref.uri)
    with pytest.raises(dg.Failure, match="does not exist"):
        shelf.store(ref)
    with pytest.raises(FileNotFoundError):
        shelf.load()


def test_the_checksum_is_the_data_version_unless_the_asset_has_its_own(shelf: Shelf) -> None:
    def version_of(value: object) -> tuple[str, object]:
        shown = shelf.store(value)
        event = shelf.instance.get_latest_materialization_event(dg.AssetKey("stored"))
        return event.asset_materialization.tags["dagster/data_version"], shown["sha256"]

    versions = [version_of({"a": value}) for value in (1, 2, 1)]
    assert all(version == digest for version, digest in versions)
    assert versions[0] == versions[2] != versions[1]
    assert version_of(dg.MaterializeResult(value=1, data_version=dg.DataVersion("mine")))[0] == "mine"


def test_pickles_can_be_forbidden(shelf: Shelf) -> None:
    strict = replace(shelf, manager=RankZeroIOManager(base_path=str(shelf.folder.parent), allow_pickle=False))
    with pytest.raises(dg.Failure, match="allow_pickle"):
        strict.store(lambda: Point(1))
    strict.store({"w": torch.ones(1)})
    assert torch.equal(strict.load()["w"], torch.ones(1))
    shelf.store(lambda: Point(1))
    for wanted in (object, ResultRef):
        with pytest.raises(dg.Failure, match="allow_pickle"):
            strict.load(wanted)


ALIKE = ["../other", "/etc", "p//q", "p/q", "/z", "%2Fz", "..", "%2E%2E", ".", "k", "k/", "a%2Fb", "a/b"]
ALIKE += ["x" * 300, "x" * 299 + "y"]


def test_partitions_that_look_alike_are_stored_apart(shelf: Shelf) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(ALIKE))
    def stored(context: dg.AssetExecutionContext) -> str:
        return context.partition_key

    for key in ALIKE:
        shelf.run(stored, partition_key=key)
    defs = shelf.defs(stored)
    for key in ALIKE:
        assert defs.load_asset_value("stored", partition_key=key, instance=shelf.instance) == key
    assert [path.name for path in shelf.folder.parent.iterdir()] == ["stored"]


@pytest.mark.parametrize("make", [UPath, Path])
def test_the_root_may_be_a_path(shelf: Shelf, make: type) -> None:
    replace(shelf, manager=RankZeroIOManager(base_path=make(shelf.folder.parent))).store({"a": 1})
    assert (shelf.folder / "rankzero.json").exists()


def test_keys_with_slashes_and_a_partition_and_an_asset_below_it_are_stored_apart(shelf: Shelf) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["k"]))
    def stat() -> str:
        return "the partition"

    keys = [["a", "b/c"], ["a/b", "c"], ["a", "b", "c"], ["stat", "k"], ["stat", "@partitions", "k"]]

    @dg.multi_asset(outs={f"out{number}": dg.AssetOut(key=dg.AssetKey(key)) for number, key in enumerate(keys)})
    def others():
        return tuple(range(len(keys)))

    shelf.run(stat, partition_key="k")
    shelf.run(others)
    defs = shelf.defs(stat, others)
    assert defs.load_asset_value("stat", partition_key="k", instance=shelf.instance) == "the partition"
    assert [defs.load_asset_value(dg.AssetKey(key), instance=shelf.instance) for key in keys] == [*range(len(keys))]


def test_dimensions_of_a_partition_are_kept_apart_and_found_by_a_plain_text(shelf: Shelf) -> None:
    dimensions = {
        "two": dg.StaticPartitionsDefinition(["c", "b/c"]),
        "one": dg.StaticPartitionsDefinition(["a/b", "a"]),
    }
    keys = [dg.MultiPartitionKey({"one": "a/b", "two": "c"}), dg.MultiPartitionKey({"one": "a", "two": "b/c"})]

    @dg.asset(partitions_def=dg.MultiPartitionsDefinition(dimensions))
    def stored(context: dg.AssetExecutionContext) -> str:
        return context.partition_key

    @dg.asset(ins={"stored": dg.AssetIn(partition_mapping=dg.SpecificPartitionsPartitionMapping(["a|b/c"]))})
    def reader(stored: object) -> object:
        return stored

    for key in keys:
        shelf.run(stored, partition_key=key)
    defs = shelf.defs(stored)
    assert [defs.load_asset_value("stored", partition_key=key, instance=shelf.instance) for key in keys] == keys
    assert shelf.run(stored, reader, selection=[reader]).output_for_node("reader") == keys[1]
