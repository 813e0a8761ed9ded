"""What is made on Kubernetes for a driver: the Secret with its program, rankzero and what is private; its Job."""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rankzero.errors import EngineError, InvalidJobError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 30.0
"""Seconds for one request to the API server."""

_SUBMISSION = "spark.kubernetes.authenticate.submission."
_LONGEST_SECRET = 1 << 20
_LONGEST_STEM = 40


def require_client() -> None:
    """Raises InvalidJobError without the package ``kubernetes``."""
    if importlib.util.find_spec("kubernetes") is None:
        raise InvalidJobError(
            "a driver on Kubernetes gets what is secret by a Secret, which needs the package kubernetes here: "
            "pip install 'rankzero[kubernetes]'"
        )


def name_of(run_id: str) -> str:
    """A name for the driver's pod and its Secret, as Kubernetes allows them."""
    stem = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:_LONGEST_STEM].strip("-")
    return f"rankzero-{stem}-{secrets.token_hex(4)}"


class Secret:
    """A Secret of the driver's namespace, which ends with the driver's pod, or its Job."""

    def __init__(self, master: str, conf: Mapping[str, str], name: str) -> None:
        self._name = name
        self._namespace = _namespace_of(conf)
        self._client = _connect(master, conf)
        self._api = _kubernetes().client.CoreV1Api(self._client)

    @contextlib.contextmanager
    def created(self, data: Mapping[str, bytes]) -> Iterator[None]:
        """Makes it, and removes it if the block raises.

        Raises:
            EngineError: the API server does not take it.
            InvalidJobError: it is larger than a Secret may be.
        """
        if (size := sum(map(len, data.values()))) > _LONGEST_SECRET:
            raise InvalidJobError(f"env and conf make a Secret of {size} bytes; Kubernetes takes {_LONGEST_SECRET}")
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "immutable": True,
            "metadata": {"name": self._name, "labels": {"app.kubernetes.io/managed-by": "rankzero"}},
            "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
        }
        try:
            self._api.create_namespaced_secret(self._namespace, body, _request_timeout=REQUEST_TIMEOUT)
        except Exception as error:
            raise EngineError(
                f"the Secret {self._name} cannot be made in namespace {self._namespace!r}: {_reason(error)}: whoever "
                "submits needs the rights to create Secrets and pods there"
            ) from error
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._api.delete_namespaced_secret(self._name, self._namespace, _request_timeout=REQUEST_TIMEOUT)
            raise

    def leave_to_pod(self) -> None:
        """Makes the driver's pod its owner, so that Kubernetes removes it with the pod."""
        try:
            pod = self._api.read_namespaced_pod(self._name, self._namespace, _request_timeout=REQUEST_TIMEOUT)
        except Exception as error:
            self._stays(error)
        else:
            self._leave_to({"apiVersion": "v1", "kind": "Pod", "name": self._name, "uid": pod.metadata.uid})

    def leave_to_job(
        self, manifest: Mapping[str, Any], of_run: str, is_earlier: Callable[[Mapping[str, str]], bool]
    ) -> None:
        """Makes the Job of the driver, which becomes its owner; Jobs that came before it end.

        Args:
            manifest: The Job's, which has the name of the Secret.
            of_run: A selector of the labels of all Jobs of the run.
            is_earlier: True for the labels of one of before: whatever that still does is in vain.

        Raises:
            EngineError: the API server does not take the Job.
        """
        api = _kubernetes().client.BatchV1Api(self._client)
        self._delete_jobs(api, of_run, is_earlier)
        try:
            job = api.create_namespaced_job(self._namespace, dict(manifest), _request_timeout=REQUEST_TIMEOUT)
        except Exception as error:
            # It may be there, if the answer alone was lost: its pod would wait for the Secret, and hold its place.
            with contextlib.suppress(Exception):
                self._delete_job(api, self._name)
            raise EngineError(
                f"the Job {self._name} cannot be made in namespace {self._namespace!r}: {_reason(error)}"
            ) from error
        self._leave_to({"apiVersion": "batch/v1", "kind": "Job", "name": self._name, "uid": job.metadata.uid})

    def _delete_jobs(self, api: Any, selector: str, is_earlier: Callable[[Mapping[str, str]], bool]) -> None:
        try:
            found = api.list_namespaced_job(self._namespace, label_selector=selector, _request_timeout=REQUEST_TIMEOUT)
            for job in found.items:
                if is_earlier(job.metadata.labels):
                    self._delete_job(api, job.metadata.name)
        except Exception as error:
            logger.warning("Jobs of earlier submissions end by themselves; they cannot be deleted: %s", _reason(error))

    def _delete_job(self, api: Any, name: str) -> None:
        api.delete_namespaced_job(
            name, self._namespace, propagation_policy="Background", _request_timeout=REQUEST_TIMEOUT
        )

    def _leave_to(self, owner: Mapping[str, str]) -> None:
        body = {"metadata": {"ownerReferences": [dict(owner)]}}
        try:
            self._api.patch_namespaced_secret(self._name, self._namespace, body, _request_timeout=REQUEST_TIMEOUT)
        except Exception as error:
            self._stays(error)

    def _stays(self, error: Exception) -> None:
        logger.warning("the Secret %s stays until somebody deletes it: %s", self._name, _reason(error))


def _namespace_of(conf: Mapping[str, str]) -> str:
    """Where Spark makes its pods."""
    return conf.get("spark.kubernetes.namespace", "default")


def read_template(path: str | None) -> dict[str, Any]:
    """The pod of a pod template file. Raises InvalidJobError if there is none in it."""
    if path is None:
        return {}
    yaml: Any = importlib.import_module("yaml")
    try:
        with open(path) as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidJobError(f"the pod template {path!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidJobError(f"the pod template {path!r} holds no pod: give metadata and spec of one, as YAML")
    return found


def _kubernetes() -> Any:
    return importlib.import_module("kubernetes")


def _connect(master: str, conf: Mapping[str, str]) -> Any:
    """The API server of a master, as Spark itself would reach it."""
    kubernetes = _kubernetes()
    settings = kubernetes.client.Configuration()
    config = kubernetes.config
    try:
        config.load_kube_config(context=conf.get("spark.kubernetes.context"), client_configuration=settings)
    except config.ConfigException:
        # In a pod; anywhere else the settings below must do.
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(client_configuration=settings)
    address = master.removeprefix("k8s://")
    settings.host = address if "://" in address else f"https://{address}"
    if ca := conf.get(f"{_SUBMISSION}caCertFile"):
        settings.ssl_ca_cert = ca
    token = conf.get(f"{_SUBMISSION}oauthToken")
    if not token and (path := conf.get(f"{_SUBMISSION}oauthTokenFile")):
        with open(path) as file:
            token = file.read().strip()
    if token:
        settings.api_key = {"authorization": f"Bearer {token}"}
    return kubernetes.client.ApiClient(settings)


def _reason(error: Exception) -> str:
    return " ".join(str(part) for part in (getattr(error, "status", ""), getattr(error, "reason", "") or error) if part)
