"""The driver of a run as a Kubernetes Job: what the API server is given, and what its pods do, one after the other."""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import servers
from tests.conftest import until
from tests.engines.kubernetes_api import KubernetesApi, kubernetes_api

from rankzero import EngineError, InvalidJobError, Launcher, RunHandle, SparkSubmitEngine
from rankzero.engines.spark import deploy
from rankzero.engines.spark.deploy import Submitted
from rankzero.engines.spark.kubernetes_job import TTL, JobOf, is_earlier
from rankzero.run.directory import RunDirectory

pytest.importorskip("kubernetes")

WAIT = 120.0
SECRET = "geheim-4711-nirgends"
IMAGE = "spark.kubernetes.container.image"


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with kubernetes_api() as server:
        yield server


@pytest.fixture
def on_job(launcher: Launcher, api: KubernetesApi) -> Callable[..., Launcher]:
    """Makes a launcher whose driver is a Job, with such settings."""

    def make(**conf: str) -> Launcher:
        settings = {IMAGE: "images/spark-torch:1", "spark.kubernetes.namespace": "ml", **conf}
        engine = SparkSubmitEngine(api.master, conf=settings, deploy_mode="job")
        return launcher.options(engine=engine, run_id="a.Run_1")

    return make


def test_a_job_mounts_a_secret_and_runs_what_a_driver_of_spark_submit_runs(
    on_job: Callable[..., Launcher], api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    launcher = on_job(**{"spark.hadoop.fs.s3a.secret.key": SECRET, "spark.driver.memory": "2g"})
    handle = launcher.options(env={"MY_TOKEN": SECRET}, max_restarts=2).submit(len, "abc")
    [job] = api.of_kind("jobs")
    name, spec = job["metadata"]["name"], job["spec"]
    assert name.startswith("rankzero-a-run-1-")
    assert job["metadata"]["annotations"] == {"rankzero/directory": handle.directory}
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (5, TTL)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert spec["template"]["metadata"]["labels"] == job["metadata"]["labels"]
    [container] = pod["containers"]
    assert container["image"] == "images/spark-torch:1"
    assert container["args"] == [
        *("driver", "--properties-file", "/opt/rankzero/spark.properties"),
        *("--conf", "spark.kubernetes.driver.pod.name=$(RANKZERO_POD)"),
        *("--conf", "spark.driver.host=$(SPARK_DRIVER_BIND_ADDRESS)"),
        *("--name", "rankzero len", "--py-files", "local:///opt/rankzero/rankzero.jar"),
        *("local:///opt/rankzero/driver.py", handle.directory, "--submission", "0"),
        *("--private", "file:/opt/rankzero/private", "--replaceable"),
    ]
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "2867Mi"}
    [volume] = pod["volumes"]
    assert volume["secret"] == {"secretName": name}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/opt/rankzero"}]
    [secret] = api.of_kind("secrets")
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    ]
    data = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    assert "spark.master k8s://https://kubernetes.default.svc\n" in data["spark.properties"].decode()
    assert SECRET not in data["spark.properties"].decode()
    assert SECRET not in json.dumps(job)
    assert deploy.unpack(data["private"].decode())["env"]["MY_TOKEN"] == SECRET
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []


def test_the_pod_is_what_settings_and_template_say(
    on_job: Callable[..., Launcher], api: KubernetesApi, tmp_path: Path
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(
        "metadata: {labels: {team: ml}}\n"
        "spec:\n"
        "  tolerations: [{key: spot}]\n"
        "  containers:\n"
        "    - {name: ours, env: [{name: A, value: b}]}\n"
        "    - {name: proxy, image: images/proxy}\n"
    )
    executors = tmp_path / "executors.yaml"
    executors.write_text("spec: {}\n")
    volume = "spark.kubernetes.driver.volumes.persistentVolumeClaim.runs"
    conf = {
        "spark.kubernetes.driver.podTemplateFile": str(template),
        "spark.kubernetes.executor.podTemplateFile": str(executors),
        f"{volume}.mount.path": "/shared",
        f"{volume}.mount.readOnly": "false",
        f"{volume}.options.claimName": "runs",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
        "spark.kubernetes.container.image.pullSecrets": "one, two",
        "spark.kubernetes.node.selector.pool": "cpu",
        "spark.kubernetes.driver.label.cost": "7",
    }
    on_job(**conf).submit(len, "abc")
    template_of_job = api.of_kind("jobs")[0]["spec"]["template"]
    labels, pod = template_of_job["metadata"]["labels"], template_of_job["spec"]
    assert (labels["team"], labels["cost"]) == ("ml", "7")
    assert pod["tolerations"] == [{"key": "spot"}]
    assert pod["serviceAccountName"] == "spark"
    assert pod["nodeSelector"] == {"pool": "cpu"}
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    ours, proxy = pod["containers"]
    assert (ours["name"], ours["env"][0]) == ("ours", {"name": "A", "value": "b"})
    assert proxy == {"name": "proxy", "image": "images/proxy"}
    assert pod["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    assert ours["volumeMounts"][0] == {"name": "runs", "mountPath": "/shared", "readOnly": False}
    data = {key: base64.b64decode(value) for key, value in api.of_kind("secrets")[0]["data"].items()}
    assert data["executors.yaml"] == executors.read_bytes()
    moved = deploy.unpack(data["private"].decode())["engine"]["conf"]["spark.kubernetes.executor.podTemplateFile"]
    assert moved == "/opt/rankzero/executors.yaml"


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"spark.kubernetes.driver.scheduler.name": "volcano"}, "put it into the pod template"),
        ({"spark.kubernetes.driverEnv.A": "b"}, "put it into the pod template"),
        ({"spark.kubernetes.driver.podTemplateFile": "/no/such.yaml"}, "'/no/such.yaml' cannot be read"),
        ({"spark.kubernetes.executor.podTemplateFile": "/no/such.yaml"}, "of executors cannot be read"),
        ({"spark.driver.memory": "much"}, "spark.driver.memory is 'much'"),
    ],
)
def test_what_makes_no_job_is_refused(
    on_job: Callable[..., Launcher], api: KubernetesApi, tmp_path: Path, conf: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidJobError, match=words):
        on_job(**conf).submit(len, "abc")
    assert api.objects == {}


def test_a_job_that_is_refused_fails_the_run_and_leaves_no_secret(
    on_job: Callable[..., Launcher], api: KubernetesApi
) -> None:
    api.refused = {"jobs"}
    launcher = on_job()
    with pytest.raises(EngineError, match="the Job rankzero-a-run-1-.* cannot be made in namespace 'ml': 403"):
        launcher.submit(len, "abc")
    assert api.of_kind("secrets") == []
    found = launcher.find()
    assert found is not None
    assert found.status().state == "failed"


def test_a_job_whose_making_was_not_answered_is_not_left_behind(
    on_job: Callable[..., Launcher], api: KubernetesApi
) -> None:
    api.unanswered = {"jobs"}
    with pytest.raises(EngineError, match="the Job rankzero-a-run-1-.* cannot be made in namespace 'ml': 504"):
        on_job().submit(len, "abc")
    assert api.objects == {}


def test_a_submitter_that_was_held_up_leaves_the_job_of_its_heir() -> None:
    labels = [JobOf("name", Submitted("/runs/a", number, "train"), 0).labels for number in range(3)]
    assert [is_earlier(Submitted("/runs/a", 1, "train"), each) for each in labels] == [True, False, False]


def test_a_second_submitter_attaches_and_a_later_submission_ends_the_jobs_before(
    on_job: Callable[..., Launcher], api: KubernetesApi
) -> None:
    launcher = on_job()
    handle = launcher.submit(len, "abc")
    launcher.submit(len, "abc")
    assert len(api.of_kind("jobs")) == 1, "the first still waits for its pod"
    launcher.options(run_id="another").submit(len, "abc")
    handle.cancel()
    assert handle.status().state == "cancelled"
    launcher.submit(len, "abc")
    submissions = [job["metadata"]["labels"]["rankzero/submission"] for job in api.of_kind("jobs")]
    assert sorted(submissions) == ["0", "1"], "one of each run"


class Pods:
    """Runs the pods of the only Job as the image's entry point does, in processes of this machine."""

    def __init__(self, api: KubernetesApi, place: Path) -> None:
        import pyspark

        self._home = Path(pyspark.__file__).parent
        self._place = place
        [job] = api.of_kind("jobs")
        [container] = job["spec"]["template"]["spec"]["containers"]
        self._args: list[str] = container["args"]
        [secret] = api.of_kind("secrets")
        place.mkdir()
        for name, value in secret["data"].items():
            (place / name).write_bytes(base64.b64decode(value))
        # There is no cluster: executors of this machine take the place of its pods.
        private = deploy.unpack((place / "private").read_text())
        here = {"spark.master": "local[2]", "spark.ui.enabled": "false", "spark.pyspark.python": sys.executable}
        private["engine"]["conf"] |= here
        (place / "private").write_text(deploy.pack(private))
        text = (place / "spark.properties").read_text().replace("k8s://https://kubernetes.default.svc", "local[2]")
        (place / "spark.properties").write_text(text)
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Another pod."""
        facts = {"$(RANKZERO_POD)": f"pod-{len(self.running)}", "$(SPARK_DRIVER_BIND_ADDRESS)": "127.0.0.1"}
        arguments = []
        for argument in self._args[1:]:
            for name, value in {**facts, "/opt/rankzero": str(self._place)}.items():
                argument = argument.replace(name, value)
            arguments.append(argument)
        command = [str(self._home / "bin" / "spark-submit"), "--conf", "spark.driver.bindAddress=127.0.0.1"]
        log = self._place / f"pod-{len(self.running)}.log"
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": ""}
        self.running.append(servers.start(*command, "--deploy-mode", "client", *arguments, log=log, env=env))
        return self.running[-1]


@pytest.fixture
def pods(api: KubernetesApi, tmp_path: Path) -> Iterator[Callable[[], Pods]]:
    """Makes the pods of the Job that there is."""
    made: list[Pods] = []

    def make() -> Pods:
        made.append(Pods(api, tmp_path / "secret"))
        return made[-1]

    yield make
    servers.stop([pod for pods in made for pod in pods.running])


def steps(until_there: str) -> list[Any]:
    import time

    import rankzero.train as rt

    context = rt.get_context()
    before = rt.get_checkpoint()
    if before is None:
        rt.report({"step": 1}, checkpoint={"step": 1})
    rt.barrier()
    while not os.path.exists(until_there):
        time.sleep(0.05)
    return [before and before.load()["step"], context.attempt]


@pytest.mark.soak
def test_the_next_pod_goes_on_where_a_lost_one_was(
    on_job: Callable[..., Launcher], pods: Callable[[], Pods], tmp_path: Path
) -> None:
    launcher = on_job().options(max_restarts=1, start_timeout=WAIT)
    handle: RunHandle[Any] = launcher.submit(steps, str(tmp_path / "go"))
    made = pods()
    first = made.start()
    until(lambda: RunDirectory(handle.directory).status().checkpoint, WAIT, "a checkpoint")
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT) != 0, "Kubernetes takes an exit by 0 for the end of the run"
    assert handle.status().state == "running", "a follower waits for the next pod"
    (tmp_path / "go").touch()
    second = made.start()
    assert handle.result(timeout=WAIT) == [1, 1]
    assert second.wait(WAIT) == 0
    assert "the driver of the run was lost" in " ".join(
        event["what"] for event in handle.events() if event["type"] == "restart"
    )
    # One that Kubernetes starts although the run has ended has nothing to do, and says so by its exit.
    assert made.start().wait(WAIT) == 0


@pytest.mark.soak
def test_a_run_without_restarts_ends_with_its_driver_and_says_so(
    on_job: Callable[..., Launcher], pods: Callable[[], Pods], tmp_path: Path
) -> None:
    handle: RunHandle[Any] = on_job().options(start_timeout=WAIT).submit(steps, str(tmp_path / "go"))
    made = pods()
    first = made.start()
    until(lambda: RunDirectory(handle.directory).status().checkpoint, WAIT, "a checkpoint")
    first.kill()
    first.wait()
    assert made.start().wait(WAIT) == 0
    with pytest.raises(EngineError, match="driver of the run was lost.*max_restarts=0"):
        handle.result(timeout=WAIT)


@pytest.mark.soak
def test_a_run_in_a_pod_is_cancelled_through_its_directory(
    on_job: Callable[..., Launcher], pods: Callable[[], Pods], tmp_path: Path
) -> None:
    handle: RunHandle[Any] = on_job().submit(steps, str(tmp_path / "go"))
    pod = pods().start()
    until(lambda: RunDirectory(handle.directory).status().checkpoint, WAIT, "a checkpoint")
    handle.cancel()
    assert pod.wait(WAIT) == 0
    assert handle.status().state == "cancelled"
