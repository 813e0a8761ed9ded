"""`hvd.elastic`: states that survive a failure, by rankzero's attempts and checkpoints.

Horovod keeps the processes and creates a new ring. rankzero starts the next attempt (``max_restarts``), in which `run`
restores the last commit.
"""

from rankzero.compat.horovod.torch.elastic.sampler import ElasticSampler
from rankzero.compat.horovod.torch.elastic.state import ObjectState, State, TorchState, run
from rankzero.compat.horovod.torch.world import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]
