"""`Secret`: the Kubernetes Secret that holds a driver's program, rankzero itself and the private configuration."""

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

from rankzero import bounds
from rankzero.advice import require
from rankzero.errors import EngineError, InvalidJobError

logger = logging.getLogger(__name__)

_SUBMISSION = "spark.kubernetes.authenticate.submission."
_LONGEST_SECRET = 1 << 20
_LONGEST_STEM = 40


def require_client() -> None:
    """Raises InvalidJobError if the package ``kubernetes`` is not installed."""
    require("a driver on Kubernetes gets its secrets in a Secret, and creating one needs", "kubernetes", "kubernetes")


def name_of(run_id: str) -> str:
    """Returns a new name for the driver's pod and its Secret, in the characters that Kubernetes allows."""
    stem = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:_LONGEST_STEM].strip("-")
    return f"rankzero-{stem}-{secrets.token_hex(4)}"


class Secret:
    """A Secret in the driver's namespace, which Kubernetes removes with the driver's pod."""

    def __init__(self, master: str, conf: Mapping[str, str], name: str) -> None:
        self._name = name
        self._namespace = _namespace_of(conf)
        self._client = _connect(master, conf)
        self._api = _kubernetes().client.CoreV1Api(self._client)

    @contextlib.contextmanager
    def created(self, data: Mapping[str, bytes]) -> Iterator[None]:
        """Creates the Secret, and deletes it if the block raises.

        Args:
            data: The content of each file, by name.

        Raises:
            EngineError: the API server refuses the Secret.
            InvalidJobError: the data exceed the size limit of a Secret.
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
            self._api.create_namespaced_secret(self._namespace, body, _request_timeout=bounds.HTTP_REQUEST_TIMEOUT)
        except Exception as error:
            raise EngineError(
                f"the Secret {self._name} cannot be created in namespace {self._namespace!r}: {_reason(error)}: the "
                "account that submits needs the rights to create Secrets and pods there"
            ) from error
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._api.delete_namespaced_secret(
                    self._name, self._namespace, _request_timeout=bounds.HTTP_REQUEST_TIMEOUT
                )
            raise

    def leave_to_pod(self) -> None:
        """Makes the driver's pod the owner of the Secret, so that Kubernetes removes both together."""
        try:
            pod = self._api.read_namespaced_pod(
                self._name, self._namespace, _request_timeout=bounds.HTTP_REQUEST_TIMEOUT
            )
        except Exception as error:
            self._warn_of_leftover(error)
            return
        owner = {"apiVersion": "v1", "kind": "Pod", "name": self._name, "uid": pod.metadata.uid}
        body = {"metadata": {"ownerReferences": [owner]}}
        try:
            self._api.patch_namespaced_secret(
                self._name, self._namespace, body, _request_timeout=bounds.HTTP_REQUEST_TIMEOUT
            )
        except Exception as error:
            self._warn_of_leftover(error)

    def _warn_of_leftover(self, error: Exception) -> None:
        logger.warning("the Secret %s stays until it is deleted by hand: %s", self._name, _reason(error))


def _namespace_of(conf: Mapping[str, str]) -> str:
    """Returns the namespace in which Spark creates its pods."""
    return conf.get("spark.kubernetes.namespace", "default")


def _kubernetes() -> Any:
    return importlib.import_module("kubernetes")


def _connect(master: str, conf: Mapping[str, str]) -> Any:
    """Returns a client of the master's API server, with the credentials that Spark itself would use."""
    kubernetes = _kubernetes()
    settings = kubernetes.client.Configuration()
    config = kubernetes.config
    try:
        config.load_kube_config(context=conf.get("spark.kubernetes.context"), client_configuration=settings)
    except config.ConfigException:
        # In a pod this finds the service account. Elsewhere the settings below are all there is.
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(client_configuration=settings)
    address = master.removeprefix("k8s://")
    settings.host = address if "://" in address else f"https://{address}"
    if ca := conf.get(f"{_SUBMISSION}caCertFile"):
        settings.ssl_ca_cert = ca
    if certificate := conf.get(f"{_SUBMISSION}clientCertFile"):
        settings.cert_file = certificate
    if key := conf.get(f"{_SUBMISSION}clientKeyFile"):
        settings.key_file = key
    token = conf.get(f"{_SUBMISSION}oauthToken")
    if not token and (path := conf.get(f"{_SUBMISSION}oauthTokenFile")):
        with open(path) as file:
            token = file.read().strip()
    if token:
        settings.api_key = {"authorization": f"Bearer {token}"}
    return kubernetes.client.ApiClient(settings)


def _reason(error: Exception) -> str:
    return " ".join(str(part) for part in (getattr(error, "status", ""), getattr(error, "reason", "") or error) if part)
