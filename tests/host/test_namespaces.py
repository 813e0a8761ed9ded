"""The scope in which a process id is valid."""

import subprocess
import sys

import pytest

from rankzero.host.processes import process_namespace

PROGRAM = """
import resource
from rankzero.host.processes import process_namespace
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
process_namespace()
resource.setrlimit(resource.RLIMIT_NOFILE, limit)
print(process_namespace())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces of processes")
def test_a_moment_without_descriptors_does_not_decide_for_the_life_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == process_namespace()
