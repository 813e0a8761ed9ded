"""`DeepspeedTorchDistributor` of ``pyspark.ml.deepspeed.deepspeed_distributor``, on rankzero's launcher."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from typing import Any

from rankzero.compat.torch_distributor import TorchDistributor
from rankzero.errors import InvalidJobError
from rankzero.kinds import POSITIVE
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
        self._config: Any = deepspeedConfig or None
        if isinstance(self._config, (str, os.PathLike)) and os.path.isfile(self._config):
            try:
                with open(self._config) as file:
                    self._config = dict(json.load(file))
            except (TypeError, ValueError) as error:
                raise InvalidJobError(f"deepspeedConfig {deepspeedConfig} is no JSON object: {error}") from None
        if not isinstance(self._config, (str, os.PathLike, dict, type(None))):
            raise InvalidJobError(f"deepspeedConfig is {deepspeedConfig!r}; give a dict or the path of a JSON file")

    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a function or a script and returns rank 0's value, as `TorchDistributor.run` does."""
        with tempfile.TemporaryDirectory(prefix="rankzero-deepspeed-") as directory:
            # A script gets the path of a local file for a reference, on every host.
            config = ResultRef.save(self._config, directory) if isinstance(self._config, dict) else self._config
            flags = ["--deepspeed"] if config is None else ["--deepspeed", "--deepspeed_config", config]
            if callable(train_object):
                return super().run(_configured(train_object, self._config), *args, **kwargs)
            return super().run(train_object, *args, *flags, **kwargs)


def _configured(function: Any, config: Any) -> Any:
    """Returns the function with the configuration in ``sys.argv``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        path = config
        if isinstance(config, dict):
            # The agent's directory is removed when the run ends.
            scratch = os.environ.get("RANKZERO_SCRATCH")
            with tempfile.NamedTemporaryFile("w", suffix=".json", dir=scratch, delete=False) as file:
                json.dump(config, file)
            path = file.name
        sys.argv[1:] = ["--deepspeed"] if path is None else ["--deepspeed", "--deepspeed_config", path]
        return function(*args, **kwargs)

    return call
