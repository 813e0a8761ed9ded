"""`DeepspeedTorchDistributor` of ``pyspark.ml.deepspeed.deepspeed_distributor``, on rankzero's launcher."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rankzero.compat.torch_distributor import TorchDistributor
from rankzero.errors import InvalidJobError
from rankzero.kinds import POSITIVE
from rankzero.launcher import Launcher
from rankzero.values.ref import ResultRef


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

    It raises what `TorchDistributor` does.

    Example:
        >>> from rankzero.compat.deepspeed_distributor import DeepspeedTorchDistributor
        >>> distributor = DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig={"train_batch_size": 8})
        >>> distributor.run(lambda: __import__("sys").argv[1:3])
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
        ranks = POSITIVE.check("numGpus", numGpus) * POSITIVE.check("nnodes", nnodes)
        super().__init__(ranks, localMode, useGpu, self._DEEPSPEED_SSL_CONF)
        self.deepspeed_config = deepspeedConfig
        self._config = _read(deepspeedConfig)

    def _launch(self, launcher: Launcher, train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = self._config
        if callable(train):
            return launcher.run(_configured(train, config), *args, **kwargs)
        with tempfile.TemporaryDirectory(prefix="rankzero-deepspeed-") as directory:
            # A script gets the path of a local file for a reference, on every host.
            sent = ResultRef.save(config, directory) if isinstance(config, dict) else config
            return launcher.run(train, *args, *_command_line(sent))


def _configured(function: Callable[..., Any], config: dict[str, Any] | str | None) -> Callable[..., Any]:
    """Returns the function with the configuration in ``sys.argv``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        path = config
        if isinstance(config, dict):
            # The rank's temporary directory is removed when the rank ends.
            with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
                json.dump(config, file)
            path = file.name
        sys.argv = [*sys.argv[:1], *_command_line(path)]
        return function(*args, **kwargs)

    return call


def _command_line(config: Any) -> list[Any]:
    return ["--deepspeed"] if config is None else ["--deepspeed", "--deepspeed_config", config]


def _read(config: Any) -> dict[str, Any] | str | None:
    """Returns the configuration to send: its content, or the path of a file on executors. Raises InvalidJobError."""
    if not config or isinstance(config, dict):
        return config or None
    if not isinstance(config, (str, os.PathLike)):
        raise InvalidJobError(f"deepspeedConfig is a {type(config).__name__}; give a dict or the path of a JSON file")
    if not os.path.isfile(path := os.fspath(config)):
        return path
    try:
        with open(path) as file:
            return dict(json.load(file))
    except (TypeError, ValueError) as error:
        raise InvalidJobError(f"deepspeedConfig {path} is no JSON object: {error}") from None
