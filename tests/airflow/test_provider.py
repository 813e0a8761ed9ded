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

    import jsonschema

    import airflow
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
