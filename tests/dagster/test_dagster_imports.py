"""Loading definitions must stay cheap: every code server and step process does it."""

import subprocess
import sys


def test_the_package_imports_no_heavy_library_and_dagster_knows_it() -> None:
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        # As the dg command does: every name is looked at.
        "import sys, dagster, dagster_rankzero\n"
        "from dagster_shared.libraries import DagsterLibraryRegistry\n"
        "assert DagsterLibraryRegistry.get()['dagster-rankzero'] == dagster_rankzero.__version__\n"
        "before = set(sys.modules)\n"
        "[getattr(dagster_rankzero, name) for name in dir(dagster_rankzero)]\n"
        "heavy = ('torch', 'pyspark', 'numpy', 'pandas', 'airflow', 'matplotlib', 'upath', 's3fs')\n"
        "print([name for name in heavy if name in sys.modules and name not in before])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
