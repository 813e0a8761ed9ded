"""Two hosts on one machine: namespaces of their own, joined by a switch that can lose every packet.

A host has its own network, processes, host name, /etc/hosts and mounts. Its first process reads
standard input and ends when that does, and with it every process of the host, however the tests end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, processes_with, until

from rankzero import Launcher, RunHandle, SparkEngine

TOOLS = ("ip", "unshare", "nsenter", "mount")

INTERFACE = "eth0"  # Name of every host's interface on the switch

START_TIMEOUT = 240.0
END_TIMEOUT = 15.0
CALL_TIMEOUT = 120.0

# The first process of a host: collects its orphans, and ends with its standard input.
FIRST_PROCESS = """
import os, signal, socket, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
socket.sethostname(sys.argv[1])
print("up", flush=True)
sys.stdin.read()
"""

SUBMIT = """
import sys, cloudpickle
with open(sys.argv[1], "rb") as file:
    launcher, function, args = cloudpickle.load(file)
print(launcher.submit(function, *args).directory)
"""

# Small and quick to start; the tests have two cores.
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def run(*command: str) -> str:
    """Runs a short command to its end; its output. Raises with what it wrote to standard error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A set of namespaces with one first process."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name = name
        self.address = address
        unshare = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*unshare, sys.executable, "-c", FIRST_PROCESS, name]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            self._holder.wait()
            raise RuntimeError(f"no namespaces for {name}")
        holder = self._holder.pid
        self.pid = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        self._started: list[subprocess.Popen[bytes]] = []
        self.call("ip", "link", "set", "lo", "up")

    def command(self, *command: str) -> list[str]:
        """The command that runs another one on this host, in the repository's root."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", "--"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *command]

    @property
    def environment(self) -> dict[str, str]:
        """Spark's own processes use this host's address, as no name server knows its name."""
        return {**os.environ, "SPARK_LOCAL_IP": self.address}

    def call(self, *command: str) -> str:
        """Runs a short command here; its output."""
        done = subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=CALL_TIMEOUT, env=self.environment
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def start(self, *command: str, output: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a command here; it ends with the host at the latest."""
        with open(output, "wb") as log:
            process = subprocess.Popen(
                self.command(*command), stdout=log, stderr=log, env={**self.environment, **(env or {})}
            )
        self._started.append(process)
        return process

    def hide(self, directory: Path) -> None:
        """Covers a directory, for this host, with an empty one."""
        self.call("mount", "-t", "tmpfs", "tmpfs", str(directory))

    def processes(self, marker: str) -> list[int]:
        """This host's processes that have the marker in their environment, by the ids of the tests' own host."""
        return [pid for pid in processes_with(marker) if self._has(pid)]

    def _has(self, pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid") == self._namespace
        except OSError:
            return False

    def close(self) -> None:
        """Ends the first process, and so the kernel every other one of this host."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self._holder.wait(END_TIMEOUT)
        for process in self._started:
            process.wait(END_TIMEOUT)


class Network:
    """A switch and the hosts at its ports."""

    def __init__(self) -> None:
        self._subnet = f"10.77.{secrets.randbelow(254) + 1}"
        self._id = f"{os.getpid()}-{secrets.token_hex(2)}"
        self.hosts: list[Host] = []
        self._switch = Host(f"switch-{self._id}")
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")

    def _ip(self, *arguments: str) -> None:
        # The process ids in the arguments are those of the tests' own host.
        run("nsenter", "--target", str(self._switch.pid), "--net", "ip", *arguments)

    def add(self, name: str, etc_hosts: Path) -> Host:
        """A host at a port of its own, whose name stands for 127.0.1.1, as Debian has it."""
        host = Host(f"{name}-{self._id}", f"{self._subnet}.{len(self.hosts) + 1}")
        self.hosts.append(host)
        etc_hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {host.name}\n")
        host.call("mount", "--bind", str(etc_hosts), "/etc/hosts")
        port = self._port(host)
        self._ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(host.pid))
        self._ip("link", "set", port, "master", "bridge", "up")
        host.call("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        host.call("ip", "link", "set", INTERFACE, "up")
        # With fixed neighbours a host that is cut off is not even missed by ARP: packets are just lost.
        for one, other in ((a, b) for a in self.hosts for b in self.hosts if host in (a, b) and a is not b):
            link = json.loads(other.call("ip", "-json", "link", "show", INTERFACE))[0]["address"]
            neighbour = ("neigh", "replace", other.address, "lladdr", link, "dev", INTERFACE, "nud", "permanent")
            one.call("ip", *neighbour)
        return host

    def _port(self, host: Host) -> str:
        return f"port{self.hosts.index(host)}"

    @contextlib.contextmanager
    def without(self, host: Host) -> Iterator[float]:
        """Loses every packet to and from a host, silently, as long as the block lasts; yields the Unix time."""
        self._ip("link", "set", self._port(host), "nomaster")
        try:
            yield time.time()
        finally:
            self._ip("link", "set", self._port(host), "master", "bridge")

    def close(self) -> None:
        """Ends all hosts."""
        for host in [*self.hosts, self._switch]:
            host.close()


@dataclass
class Cluster:
    """A standalone master and a worker on host ``a``, a worker on host ``b``; the driver runs on ``a``.

    Attributes:
        shared: A store that all hosts see.
        hidden: A store that the driver sees, and no executor.
    """

    network: Network
    a: Host
    b: Host
    directory: Path
    master: str = ""

    def __post_init__(self) -> None:
        for path in (self.shared, self.hidden):
            path.mkdir()

    @property
    def shared(self) -> Path:
        return self.directory / "shared"

    @property
    def hidden(self) -> Path:
        return self.directory / "hidden"

    def engine(self) -> SparkEngine:
        """Returns an engine with one executor of one core on each host."""
        small = {
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.ui.enabled": "false",
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        }
        return SparkEngine(master=self.master, conf=small)

    def submit(self, launcher: Launcher, function: Callable[..., Any], *args: Any) -> RunHandle[Any]:
        """Submits on host ``a``; the handle is that of a reader on a third host."""
        import cloudpickle

        call = self.directory / f"call-{secrets.token_hex(4)}.pkl"
        call.write_bytes(cloudpickle.dumps((launcher, function, args)))
        return RunHandle.attach(self.a.call(sys.executable, "-c", SUBMIT, str(call)).strip())

    def host_of(self, rank: int, handle: RunHandle[Any]) -> Host:
        """The host on which a rank printed its ``at`` line."""
        address = next(line.split()[1] for line in handle.logs(rank, follow=True) if line.startswith("at "))
        return next(host for host in self.network.hosts if host.address == address)


def start_cluster(cluster: Cluster) -> None:
    """Starts master and workers from pyspark's spark-class, and waits until both are registered."""
    import pyspark

    home = Path(pyspark.__file__).parent
    log = cluster.directory / "master.log"

    def start(host: Host, name: str, *arguments: str) -> Path:
        output = cluster.directory / f"{name}.log"
        env = {
            "SPARK_HOME": str(home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "SPARK_WORKER_DIR": str(cluster.directory / f"work-{name}"),
        }
        command = [str(home / "bin" / "spark-class"), *arguments, "--host", host.address, "--webui-port", "0"]
        if name == "worker-a":
            # The worker of the driver's host has mounts of its own: the driver goes on seeing its store.
            hide = f"mount -t tmpfs tmpfs '{cluster.hidden}' && exec \"$@\""
            command = ["unshare", "--mount", "sh", "-c", hide, "sh", *command]
        host.start(*command, output=output, env=env)
        return output

    def find(pattern: str, count: int) -> re.Match[str] | None:
        found = list(re.finditer(pattern, log.read_text()))
        return found[0] if len(found) >= count else None

    package = "org.apache.spark.deploy"
    start(cluster.a, "master", f"{package}.master.Master", "--port", "0")
    cluster.master = until(lambda: find(r"spark://[\d.]+:\d+", 1), START_TIMEOUT, "a master")[0]
    for host, name, cores in ((cluster.a, "worker-a", "2"), (cluster.b, "worker-b", "4")):
        start(host, name, f"{package}.worker.Worker", "--cores", cores, "--memory", "4g", cluster.master)
    until(lambda: find("Registering worker", 2), START_TIMEOUT, "two workers")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, suite_marker: str) -> Iterator[Cluster]:
    """Two hosts with a Spark cluster. Skips where this machine permits no namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("hosts are made of Linux namespaces, which need root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"hosts are made with {', '.join(missing)}, not found here")
    directory = tmp_path_factory.mktemp("two-hosts")
    with contextlib.ExitStack() as stack:
        try:
            network = Network()
            stack.callback(network.close)
            a = network.add("host-a", directory / "hosts-a")
            b = network.add("host-b", directory / "hosts-b")
            found = Cluster(network, a, b, directory)
            b.hide(found.hidden)
        except RuntimeError as error:
            pytest.skip(f"this machine permits no hosts made of namespaces: {error}")
        start_cluster(found)
        yield found
