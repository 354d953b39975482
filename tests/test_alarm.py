"""Ranks that go where no host waits for them, as over NCCL: here over Gloo, which is told to have no patience.

The host of a rank that waits for its device stands within torch; here it sleeps.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_peers import plain, ranks, within

import stretto
from stretto.testing import run_ranks
from stretto.transport.local import LocalTransport

pytestmark = pytest.mark.timeout(60)

PRELUDE = """
from stretto.transport.process_group import ProcessGroupTransport


class Hostless(ProcessGroupTransport):
    def __init__(self):
        super().__init__()
        self.patience = self.under_way = None


sync.detach()
sync = stretto.attach(model, transport=Hostless())
for _ in range(3):
    step()


def device():
    time.sleep(4.0)
"""
GONE = (
    "rank 0, pass 3: rank 1 (pid PID) died without a word, so nobody can complete this call.\n"
    "Something killed it: a signal, os._exit(), a crash outside Python, or the system for want of memory (see "
    "dmesg). Start again, on all ranks."
)
FAILED = (
    "rank 0, pass 3: rank 1 failed and left, so nobody can complete this call.\n"
    "  rank 1, pass 4, outside backward: KeyError: 'no such token' (train.py:LINE in <module>)\n"
    "Remove the cause and start again, on all ranks."
)
STANDS = "\nThis rank is at train.py:LINE in device: if it stays there, its device waits for that.\n"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("end", "said"),
    [("os.kill(os.getpid(), signal.SIGKILL)", GONE), ("raise KeyError('no such token')", FAILED)],
    ids=["killed", "failed"],
)
def test_a_rank_that_has_gone_is_named_while_the_device_waits_and_before_the_next_pass(
    tmp_path: Path, end: str, said: str
) -> None:
    body = f"""
if rank == 1:
    {end}
device()
told()
told(lambda: sync.check())
os._exit(0)
"""
    (code, printed, complaint), _ = ranks(tmp_path, PRELUDE + body)
    assert code == 0 and plain(complaint) == said + STANDS
    told = [f"PeerError after{one}" for one in printed.split("PeerError after")[1:]]
    assert [within(one, "PeerError", 0.5) for one in told[:1]] == [said] and len(told) == 2


@pytest.mark.ranks
def test_a_rank_that_has_done_all_and_leaves_in_peace_is_no_reason_for_alarm(tmp_path: Path) -> None:
    body = """
if rank == 0:
    device()
sync.detach()
"""
    assert [(code, complaint) for code, _, complaint in ranks(tmp_path, PRELUDE + body)] == [(0, "")] * 2


def test_what_cannot_be_sent_is_told_with_the_names_of_its_parameters() -> None:
    """NCCL refuses what is sent to a rank that has gone."""

    class Broken(LocalTransport):
        def all_reduce(self, tensor: torch.Tensor):
            if self.is_broken:
                raise dist.DistBackendError("remote process exited")
            return super().all_reduce(tensor)

    is_told = threading.Event()

    def worker(transport: LocalTransport) -> str:
        transport.__class__, transport.is_broken = Broken, False
        model = torch.nn.Linear(3, 1, bias=False)
        sync = stretto.attach(model, transport=transport)
        model(torch.ones(2, 3)).sum().backward()
        said = ""
        if transport.rank == 0:
            transport.is_broken = True
            with pytest.raises(stretto.CommunicationError) as caught:
                model(torch.ones(2, 3)).sum().backward()
            said = str(caught.value)
            is_told.set()
        assert is_told.wait(20.0)
        sync.detach()
        return said

    said, _ = run_ranks(worker, 2)
    assert plain(said) == (
        "rank 0, pass 2: bucket 0 (weight) could not be reduced over local (threads of one process): remote process "
        "exited\n"
        "rank 0 waits at test_alarm.py:LINE in worker; rank 1 is at test_alarm.py:LINE in worker.\n"
        "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
    )
