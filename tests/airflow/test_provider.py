"""What Airflow's managers see of the package, and what importing it costs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.airflow import versions
from tests.conftest import ROOT

PROGRAM = """
import contextlib, gc, io, json, os, sys

gc.disable()
shown = {}
import airflow_rankzero
shown["of airflow with the package"] = "airflow" in sys.modules
import airflow.sdk
before = set(sys.modules)

try:
    from airflow.sdk.plugins_manager import _get_plugins as load
    from airflow.sdk import serde
except ImportError:
    from airflow.plugins_manager import ensure_plugins_loaded as load
    from airflow.serialization import serde
load()
from rankzero import ResultRef
ref = ResultRef("/x/value.json", "json", "0" * 64, 1, {"metrics": {"loss": float("nan"), "step": [3]}})
back = serde.deserialize(json.loads(json.dumps(serde.serialize(ref), allow_nan=False)))
shown["reference"] = [back == ref, back.summary, "airflow_rankzero.operators" in sys.modules]

from airflow_rankzero import TorchDistributorOperator, torch_distributor
import airflow_rankzero.plugin, airflow_rankzero.links, airflow_rankzero.hooks
import airflow_rankzero.openlineage
heavy = {"torch", "pyspark", "py4j", "cloudpickle", "numpy", "pandas"}
shown["heavy"] = sorted(heavy & (set(sys.modules) - before))

from airflow_rankzero._compat import conf
from airflow_rankzero import provider_info

def options():
    return [conf.get("rankzero", "store"), provider_info.option("store")]

shown["options"] = options()
os.environ.update(AIRFLOW__RANKZERO__STORE="/data")
shown["changed options"] = options()

from airflow.cli import cli_parser
asked = cli_parser.get_parser().parse_args(["providers", "list", "--output", "json"])
with contextlib.redirect_stdout(io.StringIO()) as listed:
    asked.func(asked)
shown["providers"] = listed.getvalue()

from airflow.providers_manager import ProvidersManager
manager = ProvidersManager()
if hasattr(manager, "iter_connection_type_hook_ui_metadata"):
    found = {t.connection_type: t for t in manager.iter_connection_type_hook_ui_metadata()}["rankzero"]
    fields = [n for n in manager._connection_form_widgets_from_metadata if n.startswith("extra__rankzero__")]
    links = [n for n in manager.extra_links_class_names if "rankzero" in n]
    relabeled = found.field_behaviour["relabeling"]["host"]
    testable = manager.hooks["rankzero"].connection_testable
    shown["connection type"] = [found.hook_name, relabeled, len(fields), len(links), testable]

print(json.dumps(shown))
"""
"""One process for all: an import of Airflow takes seconds."""


@pytest.fixture(scope="module")
def shown(airflow_home: Path) -> dict[str, Any]:
    """What a process shows that knows this package as Airflow does, by its entry points."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def schema(name: str) -> Any:
    import airflow

    return json.loads((Path(airflow.__file__).parent / name).read_text())


def test_provider_description_is_valid() -> None:
    import jsonschema

    from airflow_rankzero.provider_info import get_provider_info

    info = get_provider_info()
    assert list(jsonschema.Draft7Validator(schema("provider_info.schema.json")).iter_errors(info)) == []
    # What the form of a connection may hold, Airflow checks in the sources of its own providers only.
    form = schema("provider.yaml.schema.json")["properties"]["connection-types"]
    assert list(jsonschema.Draft7Validator(form).iter_errors(info["connection-types"])) == []


def test_what_the_provider_names_is_there() -> None:
    import importlib

    from airflow_rankzero.provider_info import get_provider_info

    info = get_provider_info()
    classes = [each["hook-class-name"] for each in info["connection-types"]] + info["extra-links"]
    classes += [each["class-name"] for each in info["task-decorators"]]
    classes += re.findall(r"module: (airflow_rankzero\S+)", (ROOT / ".airflow-registry.yaml").read_text())
    for name in classes:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_airflow_knows_the_provider_and_its_options_and_an_import_is_cheap(shown: dict[str, Any]) -> None:
    assert '"rankzero"' in shown["providers"]
    assert (shown["options"], shown["changed options"]) == (["", ""], ["/data", "/data"])
    assert not shown["of airflow with the package"]
    assert shown["heavy"] == []


def test_airflow_offers_the_connection_type_and_the_links(shown: dict[str, Any]) -> None:
    versions.needs(3, 3, "descriptions of connection types that need no hook")
    assert shown["connection type"] == ["rankzero", "Spark master", 6, 2, True]


def test_plugin_lets_a_reference_through_xcom(shown: dict[str, Any]) -> None:
    """Without importing the operator, and with a metric that JSON cannot hold."""
    assert shown["reference"] == [True, {"metrics": {"loss": "nan", "step": [3]}}, False]
