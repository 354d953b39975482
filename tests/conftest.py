"""Quick tests first, nothing that one test does reaches the next, and what measures the machine has it alone."""

import contextlib
import fcntl
import functools
import gc
import os
import random
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
import warm_hosts
import warm_programs
from hypothesis import settings
from torch.optim import optimizer as torch_optimizer

import stretto.testing
from stretto.testing_network import EmulatedHosts

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ONE_RUN = {"found", "hosts", "outcomes", "scenes", "stepped"}
"""Fixtures by which many tests look at one run of processes: one worker has all of them, or each would run them."""

GLOO_DID_NOT_CONNECT = "Gloo connectFullMesh failed"
"""Now and then, before a test has begun: one in some thousand process groups, on a machine that does much else."""

TOLD_LATE = "AssertionError: told late"
"""By the clock, where other programs have the cores: that a rank was killed is to be told within two seconds.

What pytest raises of an assertion has its values and its words, but not its source, which only tracebacks of other
processes have: so the words say it.
"""

QUICK_TURNS = ("warm.py", "warm_hosts.py", "warm_spawn.py")
"""So many quick tests run at once: see ``pytest_runtest_protocol``."""

settings.register_profile("stretto", deadline=None, derandomize=True, database=None)
settings.load_profile("stretto")


class Weight(Enum):
    """What a test needs of the machine."""

    QUICK = 0
    HEAVY = 1
    """It has ranks in processes, or takes long; mostly it waits."""
    ALONE = 2


def weight(item):
    marks = {mark.name for mark in item.iter_markers()}
    return Weight.ALONE if "alone" in marks else Weight.HEAVY if {"ranks", "slow"} & marks else Weight.QUICK


@pytest.hookimpl(tryfirst=True)  # xdist looks at marks in its own
def pytest_collection_modifyitems(items):
    quick, heavy, alone = ([item for item in items if weight(item) == each] for each in Weight)
    if "PYTEST_XDIST_WORKER" in os.environ:  # else a module's fixtures would be made anew for each test
        heavy = spread(heavy)
    items[:] = [*quick, *heavy, *alone]  # for each of the last all others must have ended
    for item in (*heavy, *alone):
        if not item.get_closest_marker("flaky"):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=[GLOO_DID_NOT_CONNECT, TOLD_LATE]))
    for item in items:
        for name in ONE_RUN.intersection(item.fixturenames):
            if hasattr(item.module, name):
                item.add_marker(pytest.mark.xdist_group(f"{item.module.__name__} {name}"))


def spread(items):
    """Each file's tests evenly over the whole: some files mostly wait, and others use all cores."""
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shares = [(place / len(tests), test) for tests in files.values() for place, test in enumerate(tests)]
    return [test for _, test in sorted(shares, key=lambda one: one[0])]


@contextlib.contextmanager
def locked(path, how):
    with open(path) as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # processes that the test has forked have the file, too


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit's hook: to wait for others takes none of it
def pytest_runtest_protocol(item):
    """Beside one test of each other worker, unless it is marked ``alone``. It waits then, and none begins meanwhile.

    Of the quick ones, which compute all the time, some workers share a turn: more at once would only be slower.
    """
    files = Path(__file__).parent  # any will do to be locked, even read-only
    with contextlib.ExitStack() as turns:
        if weight(item) == Weight.QUICK:
            worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
            turns.enter_context(locked(files / QUICK_TURNS[worker % len(QUICK_TURNS)], fcntl.LOCK_EX))
        with locked(files / "models.py", fcntl.LOCK_EX):
            alone = weight(item) == Weight.ALONE
            turns.enter_context(locked(__file__, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        _forget_launcher(patch)  # also for fixtures that live longer than a test
        patch.setattr(stretto.testing, "mp", warm.Ranks())
        patch.setattr(EmulatedHosts, "_start_rank", warm_hosts.start_warm)
        yield
    warm_programs.stop()
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch):
    """No launcher's variables, fixed seeds, the global settings as they were, and no listener of another test."""
    _forget_launcher(monkeypatch)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):  # a handle that is left is alive
        monkeypatch.setattr(torch_optimizer, name, OrderedDict())
    random.seed(0)
    torch.manual_seed(0)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    _spare_the_collector("torch._dynamo" in sys.modules)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")


@functools.cache
def _spare_the_collector(compiler):
    """Once before the first test, and once when one has imported torch's compiler, as the first optimizer does."""
    gc.collect()
    gc.freeze()  # else each full collection goes through all of torch: a third of a second


def _forget_launcher(patch):
    for name in list(os.environ):
        if name in LAUNCHER or name.startswith(("GLOO_", "TORCHELASTIC_")):
            patch.delenv(name)
