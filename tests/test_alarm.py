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
from stretto.alarm import Alarm
from stretto.testing import run_ranks
from stretto.transport.local import LocalTransport

pytestmark = pytest.mark.timeout(60)

PRELUDE = """
from stretto.transport.process_group import ProcessGroupTransport


class Hostless(ProcessGroupTransport):
    patience = None

    def __init__(self):
        super().__init__()
        self.under_way = None


sync.detach()
sync = stretto.attach(model, transport=Hostless())
for _ in range(3):
    step()


def device(alarm=True):
    # Looked at once a second. Where an alarm is to come it goes on for a little: that says where the rank stands.
    until = time.monotonic() + (20.0 if alarm else 3.5)
    while not (alarm and sync._reducer.queue.peers.alarm.sounds) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)
"""
GONE = (
    "rank 0, pass 3: rank 1 (pid PID) died without a word, so nobody can complete this pass.\n"
    "Something killed it: a signal, os._exit(), a crash outside Python (Gloo, where ranks have sent different "
    "things), or the system because memory ran out (see dmesg). Start again, on all ranks."
)
FAILED = (
    "rank 0, pass 3: rank 1 failed and left, so nobody can complete this pass.\n"
    "  rank 1, pass 4, outside backward: KeyError: 'no such token' (train.py:LINE in <module>)\n"
    "Remove the cause and start again, on all ranks."
)
STANDS = (
    "\nThis rank is at train.py:LINE in device: if it stays there, it is waiting for something that will never come.\n"
)


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
    assert code == 0 and plain(complaint) == f"stretto: {said}{STANDS}"
    told = [f"PeerError after{one}" for one in printed.split("PeerError after")[1:]]
    assert [within(one, "PeerError", 0.5) for one in told[:1]] == [said] and len(told) == 2


@pytest.mark.ranks
@pytest.mark.parametrize("meeting", ["file", "tcp"])
def test_the_rank_with_the_store_is_missed_too(tmp_path: Path, meeting: str) -> None:
    body = """
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
device()
os._exit(0)
"""
    _, (_, _, complaint) = ranks(tmp_path, PRELUDE + body, meeting=meeting)
    assert "rank 0 (pid " in complaint and "died without a word" in complaint
    assert "waiting for something that will never" in complaint


@pytest.mark.ranks
@pytest.mark.parametrize("meeting", ["file", "tcp"])
def test_a_rank_that_has_had_fewer_batches_is_named(tmp_path: Path, meeting: str) -> None:
    """Over NCCL the pass that it lacks is sent, and the device waits."""
    body = """
if rank == 1:
    sync._reducer.queue.peers.seat.begins(4)
    device()
    told()
    os._exit(0)
"""
    _, (_, printed, complaint) = ranks(tmp_path, PRELUDE + body, meeting=meeting)
    for text in (printed, complaint):
        assert "rank 1, pass 4: rank 0 finished after 3 passes (" in text


@pytest.mark.ranks
def test_no_call_is_sent_to_a_rank_that_has_gone(tmp_path: Path) -> None:
    body = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
device()
sync._reducer.queue.peers._transport.all_gather_object = lambda value: print("SENT", flush=True)
told(lambda: sync.check())
os._exit(0)
"""
    (_, printed, _), _ = ranks(tmp_path, PRELUDE + body)
    assert within(printed, "PeerError", 0.5) == GONE


@pytest.mark.ranks
def test_a_call_that_fails_for_a_rank_that_left_in_peace_is_no_pass(tmp_path: Path) -> None:
    body = """
def refuse(value):
    raise dist.DistBackendError("remote process exited")


if rank == 0:
    device(alarm=False)
    sync._reducer.queue.peers._transport.all_gather_object = refuse
    told(lambda: sync.check())
sync.detach()
"""
    (_, printed, _), _ = ranks(tmp_path, PRELUDE + body)
    assert "rank 1 has left (it was detached), so nobody can complete this call, in check() at train.py:" in printed


@pytest.mark.ranks
def test_a_step_that_all_ranks_refuse_one_after_the_other_is_no_reason_for_alarm(tmp_path: Path) -> None:
    """Hosts that do not wait for each other may be seconds apart."""
    body = """
optimizer = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
step()
optimizer.step()
step()
model.double()
if rank == 0:
    device(alarm=False)
told(optimizer.step)
model.float()
print("--")
told()
told(optimizer.step)
"""
    for code, printed, complaint in ranks(tmp_path, PRELUDE + body):
        refused, later = printed.split("--\n")
        assert (code, complaint, later) == (0, "", "") and refused.startswith("SetupError")


@pytest.mark.ranks
def test_who_has_seen_a_rank_go_keeps_nothing_of_the_program(tmp_path: Path) -> None:
    """An error that is raised again and again would gather the frames of all who have caught it."""
    body = """
import gc, weakref

if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)


def train():
    model = Model()
    model.load_state_dict(globals()["model"].state_dict())
    local = torch.ones(3)
    device()
    told()
    told()
    return weakref.ref(local)


gone = train()
gc.collect()
print("freed" if gone() is None else "kept", flush=True)
os._exit(0)
"""
    (_, printed, _), _ = ranks(tmp_path, PRELUDE + body)
    assert printed.endswith("freed\n")


@pytest.mark.ranks
def test_a_rank_that_has_detached_has_no_thread(tmp_path: Path) -> None:
    body = """
import threading

for _ in range(4):
    sync.detach()
    print([one.name for one in threading.enumerate() if one.name.startswith("stretto")])
    sync = stretto.attach(model, transport=transport)
    step()
"""
    for code, printed, complaint in ranks(tmp_path, body):
        assert (code, printed, complaint) == (0, "[]\n" * 4, "")


@pytest.mark.ranks
def test_a_rank_that_has_done_all_and_leaves_in_peace_is_no_reason_for_alarm(tmp_path: Path) -> None:
    body = """
if rank == 0:
    device(alarm=False)
sync.detach()
"""
    assert [(code, complaint) for code, _, complaint in ranks(tmp_path, PRELUDE + body)] == [(0, "")] * 2


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("all_reduce", "bucket 0 (1.weight) could not be reduced"),
        ("broadcast", "what travels beside gradients could not be sent"),
    ],
)
def test_what_cannot_be_sent_is_told_with_rank_and_pass(kind: str, what: str) -> None:
    """NCCL refuses what is sent to a rank that has gone."""
    is_told = threading.Event()

    def refuse(*_: object) -> None:
        raise dist.DistBackendError("remote process exited")

    def worker(transport: LocalTransport) -> str:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False), torch.nn.Linear(3, 1, bias=False))
        sync = stretto.attach(model, transport=transport)
        model(torch.ones(2, 3)).sum().backward()
        said = ""
        if transport.rank == 0:
            setattr(transport, kind, refuse)
            with pytest.raises(stretto.CommunicationError) as caught:
                model(torch.ones(2, 3)).sum().backward()
            said = str(caught.value)
            assert model[1].weight.grad is None and sync._reducer.queue.peers.left
            with pytest.raises(stretto.CommunicationError, match="has lost its place among the others"):
                model(torch.ones(2, 3)).sum().backward()
            is_told.set()
        assert is_told.wait(20.0)
        sync.detach()
        return said

    said, _ = run_ranks(worker, 2)
    assert plain(said) == (
        f"rank 0, pass 2: {what} over local (threads of one process): remote process exited\n"
        "rank 0 waits at test_alarm.py:LINE in worker; rank 1 is at test_alarm.py:LINE in worker.\n"
        "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
    )


def test_an_alarm_is_given_once_and_ends_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Blames:
        error: stretto.PeerError | None = stretto.PeerError("rank 1 has gone")

        def blame(self, *, far: bool, by_itself: bool = False) -> tuple[stretto.PeerError | None, bool]:
            return self.error, True

    blames = Blames()
    alarm = Alarm(blames.blame)
    alarm.refuse()  # nobody has looked
    for _ in range(2):
        alarm.look()
    with pytest.raises(stretto.PeerError, match="rank 1 has gone"):
        alarm.refuse()
    blames.error = None  # the other had refused a step, as this rank has now
    alarm.refuse()
    assert [alarm.sounds, len(caplog.records)] == [False, 1]
