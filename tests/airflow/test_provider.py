"""What Airflow's managers see of the package, and what importing it costs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.airflow import versions
from tests.conftest import ROOT


def test_airflow_lists_the_provider(airflow_home: Path) -> None:
    command = [sys.executable, "-m", "airflow", "providers", "list", "--output", "json"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert '"rankzero"' in listed.stdout


def schema(name: str) -> Any:
    import airflow

    return json.loads((Path(airflow.__file__).parent / name).read_text())


def test_provider_description_is_valid() -> None:
    import jsonschema

    from airflow_rankzero import get_provider_info

    info = get_provider_info()
    jsonschema.validate(info, schema("provider_info.schema.json"))
    # What the form of a connection may hold, Airflow checks in the sources of its own providers only.
    properties = schema("provider.yaml.schema.json")["properties"]
    jsonschema.validate(info["connection-types"], properties["connection-types"])


def test_what_the_provider_names_is_there() -> None:
    import importlib

    from airflow_rankzero import get_provider_info

    info = get_provider_info()
    modules = [
        name for kind in ("operators", "hooks", "triggers") for each in info[kind] for name in each["python-modules"]
    ]
    assert [name.removeprefix("airflow_rankzero.") for name in modules] == ["operators", "hooks.rankzero", "triggers"]
    classes = [each["hook-class-name"] for each in info["connection-types"]] + info["extra-links"]
    classes += [each["class-name"] for each in info["task-decorators"]]
    classes += re.findall(r"module: (airflow_rankzero\S+)", (ROOT / ".airflow-registry.yaml").read_text())
    for name in modules:
        importlib.import_module(name)
    for name in classes:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def in_a_fresh_airflow(code: str, **env: str) -> str:
    """What a process prints that knows this package as Airflow does, by its entry points."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_airflow_knows_the_options_and_their_defaults(airflow_home: Path) -> None:
    code = (
        "from airflow_rankzero._compat import conf\n"
        "from airflow_rankzero import config\n"
        "print([conf.get('rankzero', name) for name in config.OPTIONS], config.store(), config.retention_days())"
    )
    assert in_a_fresh_airflow(code) == "['', '30', '', ''] None 30"
    changed = in_a_fresh_airflow(code, AIRFLOW__RANKZERO__STORE="/data", AIRFLOW__RANKZERO__RETENTION_DAYS="0")
    assert changed == "['/data', '0', '', ''] /data None"


def test_airflow_offers_the_connection_type_and_the_links(airflow_home: Path) -> None:
    versions.needs(3, 3, "descriptions of connection types that need no hook")
    code = (
        "from airflow.providers_manager import ProvidersManager\n"
        "manager = ProvidersManager()\n"
        "types = {t.connection_type: t for t in manager.iter_connection_type_hook_ui_metadata()}\n"
        "found = types['rankzero']\n"
        "fields = [n for n in manager._connection_form_widgets_from_metadata if n.startswith('extra__rankzero__')]\n"
        "links = [n for n in manager.extra_links_class_names if 'rankzero' in n]\n"
        "hook = manager.hooks['rankzero']\n"
        "print(found.hook_name, found.field_behaviour['relabeling']['host'], len(fields), len(links), "
        "hook.connection_testable)"
    )
    assert in_a_fresh_airflow(code) == "rankzero Spark master 6 3 True"


def test_importing_the_operator_loads_neither_torch_nor_spark() -> None:
    code = (
        "import sys, airflow_rankzero\n"
        "assert 'airflow' not in sys.modules\n"
        "import airflow.sdk\n"
        "before = set(sys.modules)\n"
        "from airflow_rankzero import TorchDistributorOperator, torch_distributor\n"
        "import airflow_rankzero.plugin, airflow_rankzero.links, airflow_rankzero.connection.target\n"
        "import airflow_rankzero.hooks.rankzero, airflow_rankzero.openlineage.lineage\n"
        "heavy = {'torch', 'pyspark', 'py4j', 'cloudpickle', 'numpy', 'pandas'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_plugin_lets_a_reference_through_xcom(airflow_home: Path) -> None:
    """Without importing the operator, and with a metric that JSON cannot hold."""
    code = (
        "import json\n"
        "try:\n"
        "    from airflow.sdk.plugins_manager import _get_plugins as load\n"
        "    from airflow.sdk import serde\n"
        "except ImportError:\n"
        "    from airflow.plugins_manager import ensure_plugins_loaded as load\n"
        "    from airflow.serialization import serde\n"
        "load()\n"
        "from rankzero import ResultRef\n"
        "ref = ResultRef('/x/value.json', 'json', '0' * 64, 1, {'metrics': {'loss': float('nan'), 'step': [3]}})\n"
        "back = serde.deserialize(json.loads(json.dumps(serde.serialize(ref), allow_nan=False)))\n"
        "assert back == ref, back\n"
        "assert back.summary == {'metrics': {'loss': 'nan', 'step': [3]}}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
