"""The Secret that brings a driver's pod on Kubernetes its program, rankzero, and what is private."""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
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
    """A Secret of the driver's namespace, which ends with the driver's pod."""

    def __init__(self, master: str, conf: Mapping[str, str], name: str) -> None:
        self._name = name
        self._namespace = conf.get("spark.kubernetes.namespace", "default")
        self._api = _connect(master, conf)

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
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._name, "uid": pod.metadata.uid}
            body = {"metadata": {"ownerReferences": [owner]}}
            self._api.patch_namespaced_secret(self._name, self._namespace, body, _request_timeout=REQUEST_TIMEOUT)
        except Exception as error:
            logger.warning("the Secret %s stays until somebody deletes it: %s", self._name, _reason(error))


def _connect(master: str, conf: Mapping[str, str]) -> Any:
    """The API server of a master, as Spark itself would reach it."""
    kubernetes: Any = importlib.import_module("kubernetes")
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
    return kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(settings))


def _reason(error: Exception) -> str:
    return " ".join(str(part) for part in (getattr(error, "status", ""), getattr(error, "reason", "") or error) if part)
