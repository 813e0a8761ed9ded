"""`RankZeroIOManager`: whole versions or none, verified when loaded."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest
import torch
from tests.conftest import until
from tests.dagster.dagster_events import failure_of, metadata_of, retries_of

from dagster_rankzero import RankZeroIOManager, TorchDistributorResource, torch_asset
from rankzero import ResultRef
from rankzero.bounds import UNFINISHED_AFTER
from rankzero.pipeline import store as storage


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


def store(value: object, manager: RankZeroIOManager, instance: dg.DagsterInstance) -> dict[str, object]:
    result = dg.materialize([asset_of(value)], resources={"io_manager": manager}, instance=instance)
    return metadata_of(result, "stored")


def load(manager: RankZeroIOManager, instance: dg.DagsterInstance, python_type: type | None = None) -> object:
    defs = dg.Definitions([asset_of(None)], resources={"io_manager": manager})
    return defs.load_asset_value("stored", python_type=python_type or object, instance=instance)


@pytest.fixture
def manager(assets_path: Path) -> RankZeroIOManager:
    return RankZeroIOManager(base_path=str(assets_path))


def tied() -> dict[str, torch.Tensor]:
    weight = torch.ones(2, 2)
    return {"encoder": weight, "decoder": weight}


@pytest.mark.parametrize(
    ("value", "file_format"),
    [
        ({"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)}, "torch"),
        ({"accuracy": 0.5, "classes": ["a", None]}, "json"),
        (None, "json"),
        ((1, 2), "pickle"),
        (Point(3), "pickle"),
        (tied(), "torch"),
    ],
)
def test_values_come_back_as_they_were(
    value: object, file_format: str, manager: RankZeroIOManager, instance: dg.DagsterInstance
) -> None:
    shown = store(lambda: value, manager, instance)
    assert shown["format"] == file_format
    loaded = load(manager, instance)
    if isinstance(value, dict) and file_format != "json":
        assert loaded.keys() == value.keys()
        assert all(torch.equal(loaded[key], value[key]) for key in value)
    else:
        assert type(loaded) is type(value)
        assert loaded == value


def test_functions_without_a_name_can_be_stored(manager: RankZeroIOManager, instance: dg.DagsterInstance) -> None:
    store(lambda: lambda x: x + 1, manager, instance)
    assert load(manager, instance)(1) == 2


def test_metadata_says_what_is_stored_and_where(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    shown = store({"w": torch.ones(2, 3)}, manager, instance)
    directory = assets_path / "stored"
    (data,) = directory.glob("data-*")
    assert shown["path"] == str(directory)
    assert shown["size"] == data.stat().st_size
    assert shown["parameters"] == 6
    assert data.name.startswith(f"data-{shown['sha256'][:16]}-")
    assert json.loads((directory / "manifest.json").read_text())["digest"] == f"sha256:{shown['sha256']}"


def test_without_a_path_the_instance_stores_beside_dagsters_own_io_manager(instance: dg.DagsterInstance) -> None:
    assert dg.materialize([asset_of({"a": 0})], instance=instance).success
    shown = store({"a": 1}, RankZeroIOManager(), instance)
    assert shown["path"].startswith(instance.storage_directory())
    assert load(RankZeroIOManager(), instance) == {"a": 1}
    assert dg.Definitions([asset_of(None)]).load_asset_value("stored", instance=instance) == {"a": 0}


@pytest.mark.parametrize("text", ['{"name": "my web app", "icons": []}', "[]"])
def test_a_manifest_of_another_program_is_kept(
    text: str, manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    foreign = assets_path / "stored" / "manifest.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text(text)
    for use in (lambda: store({"a": 1}, manager, instance), lambda: load(manager, instance)):
        with pytest.raises(dg.Failure, match="another program wrote"):
            use()
    assert foreign.read_text() == text
    assert [path.name for path in foreign.parent.iterdir()] == ["manifest.json"]


def test_a_manifest_that_names_another_place_deletes_nothing(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    where = store(1, manager, instance)
    manifest = Path(str(where["path"])) / "manifest.json" if "path" in where else next(tmp_path.rglob("manifest.json"))
    victim = tmp_path / "victim"
    victim.mkdir()
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "superseded": os.path.relpath(victim, manifest.parent)}))
    store(2, manager, instance)
    store(3, manager, instance)
    assert victim.exists()
    assert load(manager, instance) == 3


def test_a_torn_manifest_is_replaced(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    store({"a": 1}, manager, instance)
    manifest = assets_path / "stored" / "manifest.json"
    manifest.write_text(manifest.read_text()[:20])
    with pytest.raises(dg.Failure, match="damaged"):
        load(manager, instance)
    store({"a": 2}, manager, instance)
    assert load(manager, instance) == {"a": 2}


def test_a_manifest_of_a_later_version_is_named_and_kept(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    store({"a": 1}, manager, instance)
    manifest = assets_path / "stored" / "manifest.json"
    later = json.dumps({**json.loads(manifest.read_text()), "compression": "zstd"})
    manifest.write_text(later)
    for use in (lambda: store({"a": 2}, manager, instance), lambda: load(manager, instance)):
        with pytest.raises(dg.Failure, match="a later version of rankzero wrote .*, with compression"):
            use()
    assert manifest.read_text() == later


def test_what_killed_writers_left_goes_after_an_hour(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    """And what a living one writes stays, however long ago it began."""
    folders = {name: assets_path / "stored" / f".writing-{name:_<8}" for name in ("killed", "starting", "slow")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for name in ("killed", "slow"):
        (folders[name] / "data").write_text("half of it")
    long_ago = time.time() - 2 * UNFINISHED_AFTER()
    for path in (folders["killed"] / "data", folders["killed"], folders["slow"]):
        os.utime(path, (long_ago, long_ago))
    store({"a": 1}, manager, instance)
    assert {name for name, folder in folders.items() if folder.exists()} == {"starting", "slow"}


@pytest.mark.parametrize("is_reference", [False, True])
def test_a_stored_version_survives_a_power_failure(
    is_reference: bool,
    manager: RankZeroIOManager,
    instance: dg.DagsterInstance,
    assets_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = ResultRef.save({"a": 1}, tmp_path / "elsewhere") if is_reference else {"a": 1}
    # A handle is copied, as from another file system.
    monkeypatch.setattr(storage, "copy_within", lambda source, target: False)
    synced, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store(value, manager, instance)
    files = list((assets_path / "stored").iterdir())
    assert len(files) == 2
    for path in (*files, assets_path / "stored", assets_path):
        assert path.stat().st_ino in synced, path


def test_a_loaded_state_dict_is_stored_again_as_it_was(
    manager: RankZeroIOManager, instance: dg.DagsterInstance
) -> None:
    first = store({"a": torch.ones(2), "b": torch.zeros(2)}, manager, instance)
    again = store(load(manager, instance), manager, instance)
    assert (again["format"], again["sha256"]) == ("torch", first["sha256"])


def test_nothing_stored_is_a_missing_file(manager: RankZeroIOManager, instance: dg.DagsterInstance) -> None:
    with pytest.raises(FileNotFoundError, match="stored"):
        load(manager, instance)


def test_a_flipped_bit_is_found_and_not_retried(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    store({"w": torch.ones(100)}, manager, instance)
    (data,) = (assets_path / "stored").glob("data-*")
    damaged = bytearray(data.read_bytes())
    damaged[-7] ^= 1
    data.write_bytes(damaged)

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=2))
    def reader(stored: object) -> None: ...

    result = dg.materialize(
        [asset_of(None), reader],
        selection=[reader],
        resources={"io_manager": manager},
        instance=instance,
        raise_on_error=False,
    )
    description, facts = failure_of(result, "reader")
    assert "sha256" in description
    assert facts["path"] == str(assets_path / "stored")
    assert retries_of(result, "reader") == 0


@pytest.mark.parametrize("dying_at", [pytest.param("data-", marks=pytest.mark.soak), "manifest.json"])
def test_a_process_killed_while_storing_leaves_the_version_before(
    dying_at: str, manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    store({"version": 1}, manager, instance)
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

        dg.materialize([stored], resources={{"io_manager": RankZeroIOManager(base_path={str(assets_path)!r})}})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert load(manager, instance) == {"version": 1}
    store({"version": 3}, manager, instance)
    assert load(manager, instance) == {"version": 3}


def test_a_failing_object_store_leaves_the_version_before(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    manager = RankZeroIOManager(base_path="memory://bucket/assets")
    store({"version": 1}, manager, instance)
    pipe = MemoryFileSystem.pipe_file

    def fail(self: MemoryFileSystem, path: str, value: bytes, **options: object) -> None:
        if path.endswith("manifest.json"):
            raise OSError("the network is down")
        pipe(self, path, value, **options)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "pipe_file", fail)
        with pytest.raises(OSError, match="network"):
            store({"version": 2}, manager, instance)
    assert load(manager, instance) == {"version": 1}
    store({"version": 3}, manager, instance)
    assert load(manager, instance) == {"version": 3}


def test_a_value_that_cannot_be_stored_leaves_the_version_before(
    manager: RankZeroIOManager, instance: dg.DagsterInstance
) -> None:
    store({"version": 1}, manager, instance)
    result = dg.materialize(
        [asset_of(threading.Lock)],
        resources={"io_manager": manager},
        instance=instance,
        raise_on_error=False,
    )
    assert "pickle" in failure_of(result, "stored")[0]
    assert load(manager, instance) == {"version": 1}


def test_superseded_versions_go_after_one_more(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    refs = []
    for version in (1, 2, 2, 3):
        store({"version": version}, manager, instance)
        refs.append(load(manager, instance, ResultRef))
    assert refs[2].load() == {"version": 2}
    assert refs[3].load() == {"version": 3}
    assert len(list((assets_path / "stored").glob("data-*"))) == 2


def test_a_version_that_a_training_reads_stays_until_it_has_ended(
    manager: RankZeroIOManager,
    instance: dg.DagsterInstance,
    assets_path: Path,
    torch_distributor: TorchDistributorResource,
    tmp_path: Path,
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
    resources = {"io_manager": manager, "torch_distributor": torch_distributor}

    def trained() -> dg.ExecuteInProcessResult:
        return dg.materialize([asset_of(0), model], selection="model", resources=resources, instance=instance)

    def store_version(number: int) -> None:
        store({"version": torch.tensor(number)}, manager, instance)

    def versions() -> int:
        return len([name for name in os.listdir(assets_path / "stored") if name.startswith("data-")])

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
    (value,) = (assets_path / "model").glob("data-*")
    assert value.read_text() == "1"
    store_version(5)
    # The version that was held is a stray now, which goes after an hour.
    assert versions() == 3
    assert not [name for name in os.listdir(assets_path / "stored") if name.startswith("held-")]


def test_a_mark_of_a_run_that_cannot_be_read_keeps_its_version(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    store({"version": 1}, manager, instance)
    (first,) = (assets_path / "stored").glob("data-*")
    (assets_path / "stored" / f"held-{0:08x}-{first.name}").write_text("unknown://runs/one")
    for version in (2, 3):
        store({"version": version}, manager, instance)
    assert first.exists()
    assert load(manager, instance) == {"version": 3}


def test_files_that_no_version_names_go_after_an_hour(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store({"version": 1}, manager, instance)
    (assets_path / "stored" / "data-0123456789abcdef-01234567.json").write_text("1")
    (assets_path / "stored" / "notes").write_text("mine")
    # As Hugging Face's save_to_disk names its files, and as an asset below this one may be named.
    (assets_path / "stored" / "data-00000-of-00001.arrow").write_text("mine")
    (assets_path / "stored" / "data-0123456789abcdef-01234567.dir").mkdir()
    store({"version": 2}, manager, instance)
    assert len(list((assets_path / "stored").glob("data-*"))) == 5
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * UNFINISHED_AFTER())
    store({"version": 3}, manager, instance)
    assert load(manager, instance) == {"version": 3}
    assert len(list((assets_path / "stored").glob("data-*"))) == 4
    assert {"notes", "data-00000-of-00001.arrow"} <= set(os.listdir(assets_path / "stored"))


def test_two_materializations_at_once_leave_a_complete_version(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        store({"version": version}, manager, instance)
    upload, others = storage.upload, [3]

    def be_overtaken(path: str, target: str) -> None:
        upload(path, target)
        if others:
            # It retires the first version, which has the same content as the file that was just stored.
            store({"version": others.pop()}, manager, instance)

    monkeypatch.setattr(storage, "upload", be_overtaken)
    store({"version": 1}, manager, instance)
    assert load(manager, instance) == {"version": 1}


def test_an_input_annotated_as_a_handle_is_not_loaded(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    @dg.asset
    def reader(stored: ResultRef) -> list[str]:
        (data,) = (assets_path / "stored").glob("data-*")
        assert stored.load() == {"big": 1}
        return [type(stored).__name__, str(stored.uri == str(data))]

    stored = asset_of({"big": 1})
    result = dg.materialize([stored, reader], resources={"io_manager": manager}, instance=instance)
    assert result.output_for_node("reader") == ["ResultRef", "True"]


def test_a_handle_as_output_is_stored_by_its_file(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    ref = ResultRef.save({"w": torch.ones(4)}, tmp_path / "elsewhere")
    shown = store(ref, manager, instance)
    os.unlink(ref.uri)
    assert (shown["format"], shown["sha256"]) == ("torch", ref.sha256)
    assert torch.equal(load(manager, instance)["w"], torch.ones(4))


def test_a_handle_of_the_same_file_system_is_stored_without_reading_it(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, tmp_path: Path, assets_path: Path
) -> None:
    ref = ResultRef.save({"w": torch.ones(4)}, tmp_path / "elsewhere")
    for _ in range(2):
        store(ref, manager, instance)
        assert all(data.samefile(ref.uri) for data in (assets_path / "stored").glob("data-*"))
    assert [path.name for path in (assets_path / "stored").iterdir() if path.name.startswith(".")] == []


def test_a_stored_handle_is_read_for_its_checksum_when_it_is_opened(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = ResultRef.save({"w": torch.zeros(4)}, tmp_path / "elsewhere")
    data = bytearray(Path(ref.uri).read_bytes())
    data[-1] ^= 1
    Path(ref.uri).write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda file, _: pytest.fail(f"{file.name} was read"))
        store(ref, manager, instance)
    with pytest.raises(dg.Failure, match="changed or damaged"):
        load(manager, instance)


def test_a_handle_of_another_file_system_is_carried_over(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    ref = ResultRef.save({"w": torch.ones(4)}, tmp_path / "elsewhere")
    store(ref, manager, instance)
    os.unlink(ref.uri)
    assert torch.equal(load(manager, instance)["w"], torch.ones(4))
    damaged = ResultRef.save({"a": 1}, tmp_path / "elsewhere")
    Path(damaged.uri).write_text('{"a": 2}')
    with pytest.raises(dg.Failure, match="sha256"):
        store(damaged, manager, instance)


def test_a_torn_handle_is_not_stored(manager: RankZeroIOManager, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    ref = ResultRef.save({"a": 1}, tmp_path / "elsewhere")
    Path(ref.uri).write_text('{"a"')
    with pytest.raises(dg.Failure, match="bytes"):
        store(ref, manager, instance)
    os.unlink(ref.uri)
    with pytest.raises(dg.Failure, match="does not exist"):
        store(ref, manager, instance)
    with pytest.raises(FileNotFoundError):
        load(manager, instance)


def test_the_checksum_is_the_data_version(manager: RankZeroIOManager, instance: dg.DagsterInstance) -> None:
    versions = []
    for value in (1, 2, 1):
        shown = store({"a": value}, manager, instance)
        event = instance.get_latest_materialization_event(dg.AssetKey("stored"))
        versions.append(event.asset_materialization.tags["dagster/data_version"])
        assert versions[-1] == shown["sha256"]
    assert versions[0] == versions[2] != versions[1]


def test_an_asset_may_have_a_data_version_of_its_own(manager: RankZeroIOManager, instance: dg.DagsterInstance) -> None:
    store(dg.MaterializeResult(value=1, data_version=dg.DataVersion("mine")), manager, instance)
    event = instance.get_latest_materialization_event(dg.AssetKey("stored"))
    assert event.asset_materialization.tags["dagster/data_version"] == "mine"


def test_the_types_of_tensors_are_a_table(manager: RankZeroIOManager, instance: dg.DagsterInstance) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2, dtype=torch.bfloat16)})
    shown = store(lambda: model, manager, instance)
    assert [record.data for record in shown["dtypes"].records] == [
        {"dtype": "float32", "tensors": 2, "parameters": 8, "bytes": 32},
        {"dtype": "bfloat16", "tensors": 2, "parameters": 6, "bytes": 12},
    ]
    assert {column.name: column.type for column in shown["dtypes"].schema.columns}["bytes"] == "int"


def test_pickles_can_be_forbidden(manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path) -> None:
    strict = RankZeroIOManager(base_path=str(assets_path), allow_pickle=False)
    with pytest.raises(dg.Failure, match="allow_pickle"):
        store(lambda: Point(1), strict, instance)
    store({"w": torch.ones(1)}, strict, instance)
    assert torch.equal(load(strict, instance)["w"], torch.ones(1))
    store(lambda: Point(1), manager, instance)
    for wanted in (object, ResultRef):
        with pytest.raises(dg.Failure, match="allow_pickle"):
            load(strict, instance, wanted)


def test_a_partition_cannot_leave_its_asset(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    keys = ["../other", "/etc", "a/b"]

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(keys))
    def stored(context: dg.AssetExecutionContext) -> str:
        return context.partition_key

    defs = dg.Definitions([stored], resources={"io_manager": manager})
    for key in keys:
        dg.materialize([stored], resources={"io_manager": manager}, partition_key=key, instance=instance)
        assert defs.load_asset_value("stored", partition_key=key, instance=instance) == key
    assert [path.name for path in assets_path.iterdir()] == ["stored"]
    assert len(list((assets_path / "stored").rglob("manifest.json"))) == 3


def test_an_asset_can_start_from_its_own_partition_before(
    manager: RankZeroIOManager, instance: dg.DagsterInstance
) -> None:
    days = dg.DailyPartitionsDefinition(start_date="2026-01-01")
    before = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)

    @dg.asset(partitions_def=days, ins={"total": dg.AssetIn(partition_mapping=before)})
    def total(total: int | None) -> int:
        return (total or 0) + 1

    for day in ("2026-01-01", "2026-01-02"):
        result = dg.materialize([total], resources={"io_manager": manager}, partition_key=day, instance=instance)
    assert result.output_for_node("total") == 2


ALIKE = ["p//q", "p/q", "/z", "%2Fz", "..", "%2E%2E", ".", "k", "k/", "a%2Fb", "a/b", "x" * 300, "x" * 299 + "y"]


def test_partitions_that_look_alike_are_stored_apart(
    manager: RankZeroIOManager, instance: dg.DagsterInstance, assets_path: Path
) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(ALIKE))
    def stored(context: dg.AssetExecutionContext) -> str:
        return context.partition_key

    for key in ALIKE:
        dg.materialize([stored], resources={"io_manager": manager}, partition_key=key, instance=instance)
    defs = dg.Definitions([stored], resources={"io_manager": manager})
    for key in ALIKE:
        assert defs.load_asset_value("stored", partition_key=key, instance=instance) == key
    assert [path.name for path in assets_path.iterdir()] == ["stored"]


def test_dimensions_of_a_partition_are_kept_apart(manager: RankZeroIOManager, instance: dg.DagsterInstance) -> None:
    dimensions = {
        "one": dg.StaticPartitionsDefinition(["a/b", "a"]),
        "two": dg.StaticPartitionsDefinition(["c", "b/c"]),
    }
    keys = [dg.MultiPartitionKey({"one": "a/b", "two": "c"}), dg.MultiPartitionKey({"one": "a", "two": "b/c"})]

    @dg.asset(partitions_def=dg.MultiPartitionsDefinition(dimensions))
    def stored(context: dg.AssetExecutionContext) -> str:
        return context.partition_key

    for key in keys:
        dg.materialize([stored], resources={"io_manager": manager}, partition_key=key, instance=instance)
    defs = dg.Definitions([stored], resources={"io_manager": manager})
    assert [defs.load_asset_value("stored", partition_key=key, instance=instance) for key in keys] == keys


def test_assets_whose_keys_hold_slashes_are_stored_apart(
    manager: RankZeroIOManager, instance: dg.DagsterInstance
) -> None:
    keys = [dg.AssetKey(["a", "b/c"]), dg.AssetKey(["a/b", "c"]), dg.AssetKey(["a", "b", "c"])]

    @dg.multi_asset(outs={f"out{number}": dg.AssetOut(key=key) for number, key in enumerate(keys)})
    def assets():
        return 0, 1, 2

    dg.materialize([assets], resources={"io_manager": manager}, instance=instance)
    defs = dg.Definitions([assets], resources={"io_manager": manager})
    assert [defs.load_asset_value(key, instance=instance) for key in keys] == [0, 1, 2]


def test_a_partition_and_an_asset_of_one_path_are_refused(
    manager: RankZeroIOManager, instance: dg.DagsterInstance
) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["k"]))
    def stat() -> str:
        return "the partition"

    @dg.asset(key=["stat", "k"])
    def below() -> str:
        return "the asset"

    resources = {"io_manager": manager}
    assert dg.materialize([stat], resources=resources, partition_key="k", instance=instance).success
    refused = dg.materialize([below], resources=resources, instance=instance, raise_on_error=False)
    told, _ = failure_of(refused, "stat__k")
    assert "holds the value of the asset stat, partition k, not of the asset stat/k" in told
    defs = dg.Definitions([stat, below], resources=resources)
    with pytest.raises(dg.Failure, match="not of the asset stat/k, and their keys make one path"):
        defs.load_asset_value(["stat", "k"], instance=instance)
    assert defs.load_asset_value("stat", partition_key="k", instance=instance) == "the partition"
