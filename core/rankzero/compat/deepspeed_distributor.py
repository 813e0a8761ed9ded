"""`DeepspeedTorchDistributor` of ``pyspark.ml.deepspeed.deepspeed_distributor``, on rankzero's launcher."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rankzero.compat.torch_distributor import TorchDistributor
from rankzero.errors import InvalidJobError
from rankzero.launcher import Launcher
from rankzero.values.ref import ResultRef

CONFIG_FILE = "deepspeed.json"


class DeepspeedTorchDistributor(TorchDistributor):
    """Drop-in for pyspark's class: a script gets ``--deepspeed --deepspeed_config FILE`` on its command line.

    A function gets these arguments in ``sys.argv``. The configuration is sent with the job, and leaves no file behind.

    Args:
        numGpus: Ranks on each node.
        nnodes: Number of nodes.
        localMode: True runs on this machine, False as a barrier job of the active SparkSession.
        useGpu: Whether each rank gets a GPU.
        deepspeedConfig: A dict, or the path of a JSON file; a path that does not exist here is a path on the executors.
            None: DeepSpeed's defaults.

    Raises:
        InvalidJobError: a value is wrong.
        EngineError: as for `TorchDistributor`.

    Example:
        >>> import sys
        >>> from rankzero.compat.deepspeed_distributor import DeepspeedTorchDistributor
        >>> distributor = DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig={"train_batch_size": 8})
        >>> distributor.run(lambda: sys.argv[1:3])
        ['--deepspeed', '--deepspeed_config']
    """

    _DEEPSPEED_SSL_CONF = "deepspeed.spark.distributor.ignoreSsl"

    def __init__(
        self,
        numGpus: int = 1,
        nnodes: int = 1,
        localMode: bool = True,
        useGpu: bool = True,
        deepspeedConfig: str | os.PathLike[str] | dict[str, Any] | None = None,
    ) -> None:
        for name, count in (("numGpus", numGpus), ("nnodes", nnodes)):
            if not isinstance(count, int) or count < 1:
                raise InvalidJobError(f"{name} is {count!r}; it must be a positive integer")
        super().__init__(numGpus * nnodes, localMode, useGpu, self._DEEPSPEED_SSL_CONF)
        self.deepspeed_config = deepspeedConfig
        self._config = _read(deepspeedConfig)

    def _launch(self, launcher: Launcher, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if callable(train):
            return launcher.run(_Configured(train, self._config), *args, **kwargs)
        if not isinstance(self._config, dict):
            return launcher.run(train, *args, *_command_line(self._config))
        with tempfile.TemporaryDirectory(prefix="rankzero-deepspeed-") as directory:
            # A script gets the path of a local file for a reference, on every host.
            return launcher.run(train, *args, *_command_line(ResultRef.save(self._config, directory)))


class _Configured:
    """Wraps a function to find the configuration in ``sys.argv``."""

    def __init__(self, function: Callable[..., Any], config: dict[str, Any] | str | None) -> None:
        self._function = function
        self._config = config
        self.__name__ = getattr(function, "__name__", "train")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = self._config
        if isinstance(config, dict):
            # The rank's temporary directory is removed when the rank ends.
            path = os.path.join(tempfile.mkdtemp(), CONFIG_FILE)
            with open(path, "w") as file:
                json.dump(config, file)
            config = path
        sys.argv = [*sys.argv[:1], *_command_line(config)]
        return self._function(*args, **kwargs)


def _command_line(config: Any) -> list[Any]:
    return ["--deepspeed"] if config is None else ["--deepspeed", "--deepspeed_config", config]


def _read(config: Any) -> dict[str, Any] | str | None:
    """Returns the configuration to send: its content, or the path of a file on executors. Raises InvalidJobError."""
    if config is None or config == "" or isinstance(config, dict):
        return config or None
    if not isinstance(config, (str, os.PathLike)):
        raise InvalidJobError(f"deepspeedConfig is a {type(config).__name__}; give a dict or the path of a JSON file")
    path = os.fspath(config)
    if not os.path.isfile(path):
        return path
    try:
        with open(path) as file:
            found = json.load(file)
    except ValueError as error:
        raise InvalidJobError(f"deepspeedConfig {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidJobError(f"deepspeedConfig {path} holds a {type(found).__name__}; it must be a JSON object")
    return found
