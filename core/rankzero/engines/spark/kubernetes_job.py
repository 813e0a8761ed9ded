"""The driver of a run as a Kubernetes Job, which starts another pod when one is lost: its manifest. Pure functions.

The pod runs what a pod of ``spark-submit`` runs: the image's entry point with ``driver`` and the same program. What
Spark would read of the configuration for that pod is read here; what this does not know belongs into a pod template.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankzero.engines.spark.deploy import CODE, PRIVATE, PROGRAM, SECRET_DIRECTORY, Submitted, driver_arguments, shown
from rankzero.errors import InvalidJobError

PROPERTIES = "spark.properties"
"""Spark's settings for the pod, beside what every driver in a cluster is given."""

EXECUTORS, EXECUTOR_TEMPLATE = "executors.yaml", "spark.kubernetes.executor.podTemplateFile"
"""The pod template of executors, which Spark's driver reads, and its setting."""

TTL = 3600
"""Seconds for which Kubernetes keeps a Job that has ended, with its pods and their logs."""

RUN, SUBMISSION = "rankzero/run", "rankzero/submission"
"""Labels: by these a later submission finds the Jobs of earlier ones."""

REPLACEABLE = "--replaceable"
"""Tells the program that another pod goes on when this one is lost."""

TEMPLATE = "spark.kubernetes.driver.podTemplateFile"

_SPARE_PODS = 3
"""Pods that may fail beyond those that lose an attempt of the run: before they could look at it."""

_DRIVER = "spark.kubernetes.driver."
_CONTAINER = "spark-kubernetes-driver"
_VOLUME = re.compile(
    r"spark\.kubernetes\.driver\.volumes\.(?P<kind>persistentVolumeClaim|hostPath|nfs|emptyDir)\.(?P<name>[^.]+)\."
    r"(?:mount\.(?P<mount>path|subPath|readOnly)|options\.(?P<option>claimName|path|type|server|medium|sizeLimit))"
)
_KNOWN = re.compile(
    r"spark\.kubernetes\.driver\."
    r"(?:container\.image|master|podTemplateFile|podTemplateContainerName|request\.cores|limit\.cores|label\..+|annotation\..+)"
)
_UNITS = {"": 1 << 20, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_OVERHEAD, _LEAST_OVERHEAD = 0.4, 384 << 20
"""What Spark adds to the memory of a driver whose program is Python's."""


@dataclass(frozen=True)
class JobOf:
    """Whose Job it is.

    Attributes:
        name: Of the Job and its Secret.
        what: The run.
        max_restarts: Of the run.
    """

    name: str
    what: Submitted
    max_restarts: int

    @property
    def labels(self) -> dict[str, str]:
        """Of the Job and its pods."""
        return {**labels_of(self.what.directory), SUBMISSION: str(self.what.submission)}


def labels_of(directory: str) -> dict[str, str]:
    """What the Jobs of all submissions of a run have in common."""
    return {
        "app.kubernetes.io/managed-by": "rankzero",
        # A label holds 63 characters.
        RUN: hashlib.sha256(directory.encode()).hexdigest()[:32],
    }


def selector_of(what: Submitted) -> str:
    """Of the Jobs of all submissions of a run."""
    return f"{RUN}={labels_of(what.directory)[RUN]}"


def is_earlier(what: Submitted, labels: Mapping[str, str]) -> bool:
    """True for the labels of the Job of a submission before; whoever was held up may have an heir by now."""
    return int(labels[SUBMISSION]) < what.submission


def properties(conf: Mapping[str, str]) -> dict[str, str]:
    """Spark's settings in the pod: without what may hold credentials, which comes with the rest that is private."""
    own = {name: value for name, value in conf.items() if name.startswith("spark.kubernetes.")}
    return {**shown(conf), **own, **inside(conf)}


def inside(conf: Mapping[str, str]) -> dict[str, str]:
    """Settings that are others in the pod than where it was submitted: the API server, and a file that came along."""
    address = conf.get(f"{_DRIVER}master", "https://kubernetes.default.svc")
    template = {EXECUTOR_TEMPLATE: f"{SECRET_DIRECTORY}/{EXECUTORS}"} if EXECUTOR_TEMPLATE in conf else {}
    return {"spark.master": f"k8s://{address}", **template}


def manifest(of: JobOf, conf: Mapping[str, str], template: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The Job.

    Args:
        of: Whose.
        conf: The user's, on top of spark-defaults.conf.
        template: The pod to begin with: what the user's file of `TEMPLATE` holds.

    Raises:
        InvalidJobError: a setting of the driver's pod that only spark-submit knows.
    """
    pod = _pod(of, conf, copy.deepcopy(dict(template or {})))
    spec = {
        # A pod that exits with 0 has seen the end of the run; any other end of a pod is a lost driver.
        "backoffLimit": of.max_restarts + _SPARE_PODS,
        "ttlSecondsAfterFinished": TTL,
        # Drained and preempted pods are nobody's fault. With this a pod is replaced only once it has truly ended.
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]},
        "template": pod,
    }
    metadata = {"name": of.name, "labels": of.labels, "annotations": {"rankzero/directory": of.what.directory}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _pod(of: JobOf, conf: Mapping[str, str], template: dict[str, Any]) -> dict[str, Any]:
    foreign = [name for name in conf if name.startswith((_DRIVER, "spark.kubernetes.driverEnv."))]
    if unknown := [name for name in foreign if not (_KNOWN.fullmatch(name) or _VOLUME.fullmatch(name))]:
        raise InvalidJobError(
            f"{unknown[0]} is for spark-submit to read, which makes no Job: put it into the pod template ({TEMPLATE}), "
            "or use deploy_mode='cluster'"
        )
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    containers = spec.pop("containers", [])
    name = conf.get(f"{_DRIVER}podTemplateContainerName")
    ours: dict[str, Any] = next((found for found in containers if name is None or found.get("name") == name), {})
    volumes, mounts = _volumes(conf)
    secret = {"name": "rankzero", "secret": {"secretName": of.name}}
    container = {
        "name": _CONTAINER,
        **ours,
        **_image(conf),
        "args": _arguments(of.what),
        "env": [*ours.get("env", []), *_POD_FACTS],
        "resources": _resources(conf, ours.get("resources", {})),
        "volumeMounts": [*ours.get("volumeMounts", []), *mounts, {"name": "rankzero", "mountPath": SECRET_DIRECTORY}],
    }
    others = [found for found in containers if found is not ours]
    return {
        "metadata": {
            **metadata,
            "labels": {**metadata.get("labels", {}), **_named(conf, f"{_DRIVER}label."), **of.labels},
            "annotations": {**metadata.get("annotations", {}), **_named(conf, f"{_DRIVER}annotation.")},
        },
        "spec": {
            **spec,
            **_placement(conf, spec),
            "restartPolicy": "Never",
            "containers": [container, *others],
            "volumes": [*spec.get("volumes", []), *volumes, secret],
        },
    }


_POD_FACTS = [
    {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
    # The second is Spark's own: its entry point binds the driver there.
    for name, path in (("RANKZERO_POD", "metadata.name"), ("SPARK_DRIVER_BIND_ADDRESS", "status.podIP"))
]


def _arguments(what: Submitted) -> list[str]:
    """As Spark's own pods have them; Kubernetes puts in the facts of the pod. Executors then end with it."""
    return [
        *("driver", "--properties-file", f"{SECRET_DIRECTORY}/{PROPERTIES}"),
        *("--conf", "spark.kubernetes.driver.pod.name=$(RANKZERO_POD)"),
        *("--conf", "spark.driver.host=$(SPARK_DRIVER_BIND_ADDRESS)"),
        *("--name", what.name, "--py-files", f"local://{SECRET_DIRECTORY}/{CODE}"),
        f"local://{SECRET_DIRECTORY}/{PROGRAM}",
        *driver_arguments(what, f"file:{SECRET_DIRECTORY}/{PRIVATE}"),
        REPLACEABLE,
    ]


def _named(conf: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in conf.items() if name.startswith(prefix)}


def _image(conf: Mapping[str, str]) -> dict[str, str]:
    image = conf.get(f"{_DRIVER}container.image") or conf.get("spark.kubernetes.container.image")
    policy = conf.get("spark.kubernetes.container.image.pullPolicy")
    return {**({"image": image} if image else {}), **({"imagePullPolicy": policy} if policy else {})}


def _placement(conf: Mapping[str, str], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Of the pod: account, nodes, and who may pull its image."""
    found: dict[str, Any] = {}
    if account := conf.get("spark.kubernetes.authenticate.driver.serviceAccountName"):
        found["serviceAccountName"] = account
    if selector := _named(conf, "spark.kubernetes.node.selector."):
        found["nodeSelector"] = {**spec.get("nodeSelector", {}), **selector}
    if secrets := conf.get("spark.kubernetes.container.image.pullSecrets"):
        found["imagePullSecrets"] = [{"name": name.strip()} for name in secrets.split(",")]
    return found


def _resources(conf: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """What Spark asks for a driver: its cores, and its heap with an overhead."""
    heap = size_of("spark.driver.memory", conf.get("spark.driver.memory", "1g"))
    factor = float(conf.get("spark.driver.memoryOverheadFactor", _OVERHEAD))
    overhead = max(int(heap * factor), _LEAST_OVERHEAD)
    if said := conf.get("spark.driver.memoryOverhead"):
        overhead = size_of("spark.driver.memoryOverhead", said)
    memory = f"{(heap + overhead) >> 20}Mi"
    cores = conf.get(f"{_DRIVER}request.cores") or conf.get("spark.driver.cores", "1")
    limit = conf.get(f"{_DRIVER}limit.cores")
    return {
        **before,
        "requests": {**before.get("requests", {}), "cpu": cores, "memory": memory},
        "limits": {**before.get("limits", {}), **({"cpu": limit} if limit else {}), "memory": memory},
    }


def size_of(name: str, text: str) -> int:
    """Bytes of one of Spark's sizes; a bare number is MiB. Raises InvalidJobError."""
    found = re.fullmatch(r"(\d+)([bkmgt]?)b?", text.strip().lower())
    if not found:
        raise InvalidJobError(f"{name} is {text!r}; give a size such as 2g")
    return int(found[1]) * _UNITS[found[2]]


def _volumes(conf: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of ``spark.kubernetes.driver.volumes.KIND.NAME...``, whose options are Kubernetes' fields."""
    volumes: dict[str, dict[str, Any]] = {}
    mounts: dict[str, dict[str, Any]] = {}
    for key, value in conf.items():
        if not (found := _VOLUME.fullmatch(key)):
            continue
        name = found["name"]
        volume = volumes.setdefault(name, {"name": name, found["kind"]: {}})
        mount = mounts.setdefault(name, {"name": name})
        if option := found["option"]:
            volume.setdefault(found["kind"], {})[option] = value
        else:
            known = {"path": "mountPath"}.get(found["mount"], found["mount"])
            mount[known] = value.lower() == "true" if known == "readOnly" else value
    return list(volumes.values()), list(mounts.values())
