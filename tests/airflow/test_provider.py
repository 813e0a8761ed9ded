"""What Airflow's managers see of the package, and what importing it costs."""

import subprocess
import sys
from pathlib import Path


def test_airflow_lists_the_provider(airflow_home: Path) -> None:
    command = [sys.executable, "-m", "airflow", "providers", "list", "--output", "json"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert '"rankzero"' in listed.stdout


def test_provider_description_is_valid() -> None:
    import json

    import airflow
    import jsonschema

    from airflow_rankzero.provider_info import get_provider_info

    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_importing_the_operator_loads_neither_torch_nor_spark() -> None:
    code = (
        "import sys, airflow_rankzero\n"
        "assert 'airflow' not in sys.modules\n"
        "import airflow.sdk\n"
        "before = set(sys.modules)\n"
        "from airflow_rankzero import TorchDistributorOperator, torch_distributor\n"
        "import airflow_rankzero.plugin\n"
        "heavy = {'torch', 'pyspark', 'py4j', 'cloudpickle', 'numpy', 'pandas'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_plugin_lets_a_reference_through_xcom(airflow_home: Path) -> None:
    """Without importing the operator, and with a metric that JSON cannot hold."""
    code = (
        "import json\n"
        "from airflow.sdk.plugins_manager import _get_plugins\n"
        "_get_plugins()\n"
        "from airflow.sdk.serde import deserialize, serialize\n"
        "from rankzero import ResultRef\n"
        "ref = ResultRef('/x/value.json', 'json', '0' * 64, 1, {'metrics': {'loss': float('nan'), 'step': [3]}})\n"
        "back = deserialize(json.loads(json.dumps(serialize(ref), allow_nan=False)))\n"
        "assert back == ref, back\n"
        "assert back.summary == {'metrics': {'loss': 'nan', 'step': [3]}}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
