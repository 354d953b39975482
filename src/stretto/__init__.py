"""Data-parallel training for PyTorch: gradients leave for the other ranks while backward still runs."""

from importlib.metadata import version as _version

from .attach import attach
from .ddp import DistributedDataParallel
from .errors import (
    AlreadyAttachedError,
    CommunicationError,
    ModelMismatchError,
    PeerError,
    PlanError,
    ReplicaError,
    SetupError,
    StrettoError,
    UnsupportedError,
    WithheldError,
)
from .events import Observer
from .handle import Synchronizer
from .plan import BucketPlan, BucketSpec
from .report import Report
from .shard import shard
from .sharding import ShardedOptimizer
from .speaker import name_the_speaker as _name_the_speaker
from .specs import ParameterSpec
from .tensors import reduce
from .trace import TraceError
from .usage import Statistics

__version__ = _version("stretto")
_name_the_speaker()

__all__ = [
    "AlreadyAttachedError",
    "BucketPlan",
    "BucketSpec",
    "CommunicationError",
    "DistributedDataParallel",
    "ModelMismatchError",
    "Observer",
    "ParameterSpec",
    "PeerError",
    "PlanError",
    "ReplicaError",
    "Report",
    "SetupError",
    "ShardedOptimizer",
    "Statistics",
    "StrettoError",
    "Synchronizer",
    "TraceError",
    "UnsupportedError",
    "WithheldError",
    "attach",
    "reduce",
    "shard",
]
