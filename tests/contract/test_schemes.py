"""Every location is right, or refused in a sentence: paths, schemes, drivers and servers that promise too little."""

import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from tests.conftest import find

from rankzero import InvalidJobError, Launcher, store
from rankzero.data.files import filesystem_of
from rankzero.store import files


@pytest.fixture(autouse=True)
def fresh_drivers() -> Iterator[None]:
    """A driver that fsspec keeps has its methods from when it was made."""
    import s3fs

    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("dbfs:/runs", "'dbfs:/runs' is neither a path nor a URL"),
        ("s3:/bucket/runs", "a URL begins with s3://"),
        ("s3//bucket/runs", "is neither a path nor a URL: a URL begins with"),
        ("hdfs://namenode/runs", "Arrow's driver deletes a file before it renames another onto it"),
        ("webhdfs://namenode:9870/runs", "writes files in place"),
        ("https://example.com/runs", "does not know that it replaces files as a whole"),
        ("simplecache::s3://bucket/runs", "does not know that it replaces files as a whole"),
    ],
)
def test_what_promises_too_little_is_refused(location: str, reason: str) -> None:
    with pytest.raises(InvalidJobError, match=reason):
        store.normalize(location)
    with pytest.raises(InvalidJobError, match=reason):
        find(Launcher(run_id="one", store=location))


@pytest.mark.parametrize("prefix", ["file://", "file:", "local://", ""])
def test_a_path_may_be_written_as_hadoop_writes_it(prefix: str, tmp_path: Path) -> None:
    assert store.normalize(f"{prefix}{tmp_path}") == str(tmp_path)


needs_azure = pytest.mark.skipif(not hasattr(fs, "AzureFileSystem"), reason="this pyarrow has no client of Azure")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("gs://bucket/t/day=a%2Fb/part #1.parquet", "bucket/t/day=a%2Fb/part #1.parquet"),
        ("gs://bucket", "bucket"),
        ("gs://anonymous@bucket/t/a%2Fb?retry_limit_seconds=3", "bucket/t/a%2Fb"),
        ("s3://bucket/t/day=a%2Fb", "bucket/t/day=a%2Fb"),
        pytest.param("abfs://container@account.dfs.core.windows.net/a%2Fb", "container/a%2Fb", marks=needs_azure),
        pytest.param("abfs://account.blob.core.windows.net/container/a%2Fb", "container/a%2Fb", marks=needs_azure),
        pytest.param("abfs://account.dfs.core.windows.net/container/a%2Fb", "container/a%2Fb", marks=needs_azure),
    ],
)
def test_names_on_an_object_store_are_literal(url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # pyarrow would look for the region of the bucket.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    assert filesystem_of(url)[1] == path


def test_a_home_directory_that_is_not_known_is_not_a_folder_named_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("RANKZERO_STORE")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(InvalidJobError, match="HOME is not set .* give an absolute path"):
        find(Launcher(run_id="one"))


def test_a_creation_whose_answer_was_lost_is_ours(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    whole = s3fs.S3FileSystem._pipe_file

    async def lose_the_answer(self: Any, *args: Any, **options: Any) -> None:
        await whole(self, *args, **options)
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_pipe_file", lose_the_answer)
        s3fs.S3FileSystem.clear_instance_cache()
        assert store.create(f"{bucket}/claim", b"mine")
    assert not store.create(f"{bucket}/claim", b"another's")


@pytest.mark.parametrize("knows_argument", [True, False])
def test_a_driver_that_creates_without_a_condition_is_refused_before_anything_starts(
    bucket: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, knows_argument: bool
) -> None:
    """As s3fs ignored it before 2024.12, and servers do that speak an older S3; gcsfs and adlfs did not know it."""
    import s3fs

    whole = s3fs.S3FileSystem._pipe_file

    async def ignore(self: Any, path: str, data: bytes, **options: Any) -> Any:
        if options and not knows_argument:
            raise TypeError("_pipe_file() got an unexpected keyword argument 'mode'")
        return await whole(self, path, data)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", ignore)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(InvalidJobError, match=r"both would win. Install s3fs>=2024\.12; .*If-None-Match"):
        launcher.options(store=f"{bucket}/runs").submit(print)
    # Nothing is left of it.
    assert store.list_names(f"{bucket}/runs") == []


def test_a_mount_that_cannot_append_is_refused_before_anything_starts(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bucket behind FUSE; `docs/values.md` says which were tried."""
    real = open

    def open_(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "a" in mode:
            raise OSError(95, "Operation not supported")
        return real(path, mode, *args, **options)

    monkeypatch.setattr("rankzero.store.upkeep.open", open_, raising=False)
    with pytest.raises(InvalidJobError, match="append to files.* give the bucket's URL"):
        launcher.submit(print)
    assert os.listdir(str(launcher.store)) == []


def test_a_directory_that_may_not_be_written_is_no_matter_of_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "create", refuse)
    with pytest.raises(PermissionError):
        store.prove(str(tmp_path))
