"""What a Kubernetes API server is given for a driver: by the real spark-submit and client."""

import base64
import io
import json
import ssl
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.kubernetes_api import KubernetesApi, kubernetes_api

from rankzero import EngineError, InvalidJobError, Launcher, SparkSubmitEngine

pytest.importorskip("kubernetes")

# Not in this source, which is shipped with the run.
SECRET = "-".join(["geheim", "4711", "nirgends"])


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with kubernetes_api() as server:
        yield server


def on_kubernetes(launcher: Launcher, api: KubernetesApi, **more: str) -> Launcher:
    conf = {
        **{f"spark.kubernetes.authenticate.submission.{name}": value for name, value in more.items()},
        "spark.kubernetes.container.image": "images/spark-torch:1",
        "spark.kubernetes.namespace": "ml",
        "spark.hadoop.fs.s3a.secret.key": SECRET,
        "spark.driver.memory": "2g",
    }
    return launcher.options(engine=SparkSubmitEngine(api.master, conf=conf), env={"MY_TOKEN": SECRET}, run_id="a.Run_1")


def test_the_pod_mounts_a_secret_with_the_program_the_code_and_what_is_private(
    launcher: Launcher, api: KubernetesApi, tmp_path: Path
) -> None:
    handle = on_kubernetes(launcher, api).submit(len, "abc")
    [pod] = api.of_kind("pods")
    name = pod["metadata"]["name"]
    assert name.startswith("rankzero-a-run-1-")
    [container] = pod["spec"]["containers"]
    assert container["image"] == "images/spark-torch:1"
    assert container["args"][0] == "driver"
    inside = container["args"][container["args"].index("org.apache.spark.deploy.PythonRunner") + 1 :]
    assert inside == [
        *("local:///opt/rankzero/driver.py", handle.directory, "--submission", "0"),
        *("--private", "file:/opt/rankzero/private"),
    ]
    [volume] = [volume for volume in pod["spec"]["volumes"] if volume.get("secret", {}).get("secretName") == name]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    assert mounts == ["/opt/rankzero"]
    [secret] = api.of_kind("secrets")
    data = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    env = json.loads(base64.b64decode(data["private"]))["env"]
    # The level of this process, if a test before this one has set it.
    env.pop("RANKZERO_LOG_LEVEL", None)
    assert env == {"MY_TOKEN": SECRET}
    assert "rankzero/driver/main.py" in zipfile.ZipFile(io.BytesIO(data["rankzero.jar"])).namelist()
    compile(data["driver.py"], "driver.py", "exec")
    # Kubernetes removes it with the pod.
    assert secret["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    elsewhere = [json.dumps(found) for path, found in api.objects.items() if "/secrets/" not in path]
    assert [found for found in elsewhere if SECRET in found] == []
    assert any("PythonRunner" in found or "spark.properties" in found for found in elsewhere)
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []
    handle.cancel()
    assert handle.status().state == "cancelled"


@pytest.mark.soak
def test_a_pod_that_is_refused_fails_the_run_and_leaves_no_secret(launcher: Launcher, api: KubernetesApi) -> None:
    api.refused = {"pods"}
    refused = on_kubernetes(launcher, api)
    with pytest.raises(EngineError, match="did not take the driver"):
        refused.submit(len, "abc")
    assert api.of_kind("secrets") == []
    found = refused.find()
    assert found is not None
    assert found.status().state == "failed"


def test_who_may_make_no_secret_is_told_so(launcher: Launcher, api: KubernetesApi) -> None:
    api.refused = {"secrets"}
    with pytest.raises(EngineError, match="needs the rights to create Secrets and pods"):
        on_kubernetes(launcher, api).submit(len, "abc")


def test_a_server_that_requires_a_certificate_gets_that_of_spark(launcher: Launcher, tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=test"]
    uses = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "keyUsage=digitalSignature,keyCertSign"]
    command = ["openssl", *kind, *uses, "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate)
    tls.load_cert_chain(certificate, key)
    tls.verify_mode = ssl.CERT_REQUIRED
    files = {"caCertFile": certificate, "clientCertFile": certificate, "clientKeyFile": key}
    with kubernetes_api(tls) as api:
        api.refused = {"secrets"}
        # Only a request over an accepted connection gets this answer.
        with pytest.raises(EngineError, match="403"):
            on_kubernetes(launcher, api, **files).submit(len, "abc")


def test_an_image_must_be_named(launcher: Launcher, api: KubernetesApi) -> None:
    with pytest.raises(InvalidJobError, match="spark.kubernetes.container.image"):
        launcher.options(engine=SparkSubmitEngine(api.master)).submit(len, "abc")
