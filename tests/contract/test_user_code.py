"""What travels because the user says so: a working directory, Python files, and not what is ignored there."""

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import find
from tests.loading import load_module
from tests.tries.identities import identity_by

from rankzero import InvalidJobError, Launcher
from rankzero.submit import code_files
from rankzero.submit.code_files import UserCode
from rankzero.values import formats
from rankzero.values.formats import unpack


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with code, configuration and what should stay."""
    root = tmp_path / "project"
    write(root, settings_dot_yaml="lr: 0.1", models_dot_py="NAME = 'of the directory'", data__big_dot_bin="x" * 100)
    write(root, data__small_dot_csv="1,2", _dot_env="SECRET=1", id_rsa="key", outputs__log_dot_txt="old")
    (root / ".rankzeroignore").write_text("# as a .gitignore\n/outputs/\n*.bin\n!keep.bin\n")
    (root / "run.sh").write_text("#!/bin/sh\necho $PWD\n")
    (root / "run.sh").chmod(0o755)
    return root


def look() -> dict[str, Any]:
    models = load_module("models")
    return {
        "here": sorted(os.path.relpath(os.path.join(at, name)) for at, _, names in os.walk(".") for name in names),
        "first on the path": sys.path[0] == os.getcwd(),
        "settings": open("settings.yaml").read(),
        "models": models.NAME,
        "may run": os.access("run.sh", os.X_OK),
        "directory": os.getcwd(),
    }


def test_ranks_start_in_a_copy_of_the_working_directory(launcher: Launcher, project: Path) -> None:
    found = launcher.options(working_dir=project).run(look)
    there = ["data/small.csv", "models.py", "run.sh", "settings.yaml"]
    assert [name for name in found["here"] if "__pycache__" not in name] == there
    assert found["first on the path"]
    assert found["may run"]
    assert found["models"] == "of the directory"
    assert not os.path.exists(found["directory"])
    assert found["directory"] != str(project)


def test_links_to_directories_stay_and_are_named(
    launcher: Launcher, project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "elsewhere").symlink_to(tmp_path)
    (project / "ignored").symlink_to(tmp_path)
    (project / "linked.yaml").symlink_to(project / "settings.yaml")
    (project / "a\u202f\u3000.txt").touch()
    odd = [Path(os.fsdecode(os.fsencode(at) + b"/caf\xe9.py")) for at in (project, tmp_path)]
    for path in odd:
        path.touch()
    with open(project / ".rankzeroignore", "a") as file:
        file.write("ignored\n*.csv\n")
    found = launcher.options(working_dir=project, py_files=odd[1:]).run(look)
    there = ["a\u202f\u3000.txt", "linked.yaml", "models.py", "run.sh", "settings.yaml"]
    assert [name for name in found["here"] if "__pycache__" not in name] == there
    (line,) = (line for line in caplog.messages if "do not travel" in line)
    assert line.startswith(
        "'py_files/caf\\udce9.py, working_dir/caf\\udce9.py, working_dir/elsewhere, working_dir/id_rsa' do not travel"
    )


def use_files() -> list[str]:
    return [load_module(name).NAME for name in ("single", "package.part", "zipped")]


def test_python_files_can_be_imported_by_ranks(launcher: Launcher, tmp_path: Path) -> None:
    single = write(tmp_path / "a", single_dot_py="NAME = 'one'") / "single.py"
    package = write(tmp_path / "package", __init___dot_py="", part_dot_py="NAME = 'two'")
    (package / "__init__.py").touch()
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("zipped.py", "NAME = 'three'")
    options = launcher.options(py_files=[single, package, tmp_path / "more.zip"])
    assert options.run(use_files) == ["one", "two", "three"]


def test_the_contents_are_a_part_of_the_identity(project: Path) -> None:
    launcher = Launcher(working_dir=project)
    before = identity_by(launcher, look, (), {})
    os.utime(project / "models.py", (1, 1))
    (project / "outputs" / "log.txt").write_text("ignored, and so no part of it")
    assert identity_by(launcher, look, (), {}) == before
    (project / "settings.yaml").write_text("lr: 0.2")
    assert identity_by(launcher, look, (), {}) != before
    named = launcher.options(code_version="1")
    assert identity_by(named, look, (), {}) == identity_by(Launcher(code_version="1"), look, (), {})


def test_what_is_too_large_is_refused_by_name(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "LIMIT", 1 << 20)
    (project / "weights.pt").write_bytes(bytes(2 << 20))
    with pytest.raises(InvalidJobError, match=r"2 MiB, over the limit of 1 MiB.*weights.pt \(2 MiB\).*rankzeroignore"):
        Launcher(working_dir=project).run(print)


def test_two_of_one_name_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "other" / "common.py", tmp_path / "common.py"]
    for path in paths:
        path.touch()
    with pytest.raises(InvalidJobError, match=re.escape(f"py_files has {paths[0]} and {paths[1]}, and ranks get one")):
        launcher.options(run_id="refused", py_files=paths).run(print)
    assert find(launcher.options(run_id="refused")) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"working_dir": "/no/such/place"}, "working_dir='/no/such/place' is no directory"),
        ({"py_files": ["/no/such.py"]}, "py_files has '/no/such.py'"),
        ({"py_files": "one.py"}, "py_files is 'one.py'; give a list"),
        ({"working_dir": 3}, "working_dir is 3; give a path"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJobError, match=words):
        Launcher(**options).run(look)


@pytest.mark.parametrize(
    "name",
    [
        *("profiles.yml", "kubeconfig.yaml", "kube_config", "terraform.tfstate.backup", "prod.TFSTATE"),
        *("airflow.cfg", "Airflow.CFG", "airflow.db", "simple_auth_manager_passwords.json.generated"),
        *("dagster.yaml", "dagster_cloud.yaml", "settings.env", "server.pem", "SERVER.KEY", "id_ed25519", "id_rsa.pub"),
        *("credentials.json", "google_credentials.json", "service-account-prod.json", "secrets.toml"),
    ],
)
def test_files_that_may_hold_secrets_stay(project: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    before = UserCode(project).sent
    (project / "data" / name).write_text("password")
    assert UserCode(project).sent == before
    assert f"working_dir/data/{name}" in caplog.text
    for harmless in ("credentials.py", "keyboard.json", "environment.yaml", "monkey.txt"):
        (project / "data" / harmless).touch()
        assert UserCode(project).sent != before
        (project / "data" / harmless).unlink()


def test_archives_are_unpacked_by_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3, as on Debian 12."""
    extract = tarfile.TarFile.extractall
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(
        tarfile.TarFile, "extractall", lambda self, path=".", members=None: extract(self, path, members)
    )
    folder, unpacked = tmp_path / "folder", tmp_path / "unpacked"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    with (tmp_path / "one.tar").open("wb") as file:
        formats.write_directory(str(folder), file)
    with tarfile.open(file.name) as archive:
        unpack(archive, unpacked)
    assert (unpacked / "a.txt").read_text() == "a"
