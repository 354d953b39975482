"""torch's own DDP tests, from the installed wheel, on stretto's drop-in, on CPU. Imported by the fork server, once.

What lies in the way of running them here is lifted: skip decorators that ask for GPUs, and devices: "cuda", a rank as
device and ``.cuda(rank)`` all mean the CPU. Nothing else of the tests is changed, and nothing of them is copied.
"""

import contextlib
import datetime
import inspect
import io
import os
import sys
import tempfile
import traceback
import types
import unittest
import warnings

WORLD_SIZE = 2
SCRATCH = tempfile.gettempdir()

os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=SCRATCH, INIT_METHOD="file://")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")  # torch's test modules are full of torch's own deprecations
if "expecttest" not in sys.modules:  # torch's test base class imports it; no DDP test uses it
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_utils import TestCase  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import stretto  # noqa: E402

WITHOUT_SYNC_BATCH_NORM = ("test_ddp_uneven_inputs_stop_iteration_sync_bn",)
"""SyncBatchNorm trains on accelerators only; in these it is one of several models and not what is tested."""

OVER_THE_GROUP = ("test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler")
"""These count the process group's collectives, of which there are none where ranks share memory."""

Tests = distributed_test.DistributedTest._DistTestBase


class Swapped(stretto.DistributedDataParallel):
    """The drop-in. ``device_ids`` are left out, as everything is on the CPU."""

    made = 0
    transport = "auto"

    def __init__(self, module, device_ids=None, output_device=None, **options):
        Swapped.made += 1
        super().__init__(module, transport=Swapped.transport, **options)


class Case(Tests, TestCase):
    world_size = str(WORLD_SIZE)  # torch's tests have it as they find it in the environment

    def runTest(self):
        pass

    def _barrier(self, *args, **kwargs):
        dist.barrier()

    def _run_uneven_inputs_test(self, test_case, iteration_mapping, find_unused_params):
        """All kinds of model and all mappings of batches to ranks, but the largest model, which takes minutes."""
        if test_case.name != "large_conv_model":
            super()._run_uneven_inputs_test(test_case, iteration_mapping, find_unused_params)


def run(name, rank, world_size, meeting, pipe):
    """One rank of one test, in a process of its own; what happened goes through the pipe."""
    said = io.StringIO()
    try:
        os.chdir(os.path.dirname(meeting))
        os.environ["TEMP_DIR"] = tempfile.tempdir = os.path.dirname(meeting)
        torch.set_num_threads(1)
        put_on_cpu()
        torch.nn.parallel.DistributedDataParallel = distributed_test.DistributedDataParallel = Swapped
        store = dist.FileStore(meeting, world_size)
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        if name in WITHOUT_SYNC_BATCH_NORM:
            torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, process_group=None: module
        if name in OVER_THE_GROUP:
            Swapped.transport = "process_group"
        case = Case()
        case.rank = rank
        torch.manual_seed(0)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            inspect.unwrap(getattr(Tests, name))(case)
        assert Swapped.made, "the test never wrapped a model"
        dist.barrier()
        outcome = None
    except BaseException:
        outcome = traceback.format_exc()
    pipe.send(outcome)
    pipe.close()
    os._exit(0)  # a test that failed may have left threads of Gloo behind


def put_on_cpu():
    """Every device is the CPU."""

    def is_device(value):
        if isinstance(value, torch.device):
            return True
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, str) and value.startswith("cuda")
        )

    def with_device(function):
        def call(*args, **kwargs):
            if is_device(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return call

    def moving(function):
        def call(self, *args, **kwargs):
            args = tuple("cpu" if is_device(one) else one for one in args)
            return with_device(function)(self, *args, **kwargs)

        return call

    for factory in ("rand", "randn", "ones", "zeros", "tensor", "empty", "full"):
        setattr(torch, factory, with_device(getattr(torch, factory)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = moving(kind.to)
        kind.cuda = lambda self, *args, **kwargs: self
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: 0
    distributed_test.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
