"""One rank is stopped, or fails, around a sharded step or clipping, and goes on: nothing may be mixed, or hang, for it.

Passes and gathers are in test_waits.py. Each rank is a program of its own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_peers import plain, ranks, within

from stretto.events import Events
from stretto.family import Family
from stretto.words import FIRST_VALUE, MARKS, VALUES, Control, ControlWords

pytestmark = pytest.mark.timeout(60)

PRELUDE = """
import pathlib, threading


def soon():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


has_stopped = pathlib.Path(folder, "stopped")


def stopped(do):
    try:
        do()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    has_stopped.touch()


def when_stopped():
    # what the other has sent is still to be had
    while not has_stopped.exists():
        time.sleep(0.01)


class Breaks(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise MemoryError("no memory")
        return super().step(closure)


def pass_of(one):
    one.zero_grad()
    one(torch.ones(2, 3)).sum().backward()


second = torch.nn.Linear(3, 1)
other = stretto.attach(second, transport=transport)
optimizers = [
    stretto.shard(Breaks(one.parameters(), lr=0.1, momentum=0.9), handle, keep_grads=KEEP)
    for one, handle in ((model, sync), (second, other))
]
for _ in range(2):
    step()
    pass_of(second)
    [one.step() for one in optimizers]
before = [one.detach().clone() for one in second.parameters()]
"""
ENDING = """
stay()
os._exit(0)
"""
STOPPED = "has stopped waiting for a message that was under way in the process group"
LOST = "so it has lost its place among the others"
LOST_ELSEWHERE = (
    "rank {0}, pass {1}: this rank has lost its place in what another handle does over this process group, where "
    "others may wait for it.\n"
    "  {2}\n"
    "Call detach() on both, and attach again, on all ranks."
)
QUOTED = "failed and left, so nobody can complete this"


def programs(folder: Path, body: str, *, keep: bool = True, transport: str = "process_group") -> list[list[str]]:
    """What each of two ranks has printed, a text for each thing that was tried."""
    found = ranks(folder, PRELUDE.replace("KEEP", str(keep)) + body + ENDING, transport=transport)
    assert [code for code, *_ in found] == [0, 0], found
    return [[one.strip() for one in plain(printed).split("--\n")] for _, printed, _ in found]


@pytest.mark.ranks
def test_who_has_lost_its_place_in_a_pass_does_not_step(tmp_path: Path) -> None:
    """Else the others' shares are stepped without its own, and nobody knows."""
    body = """
if rank == 1:
    soon()
    stopped(step)
else:
    when_stopped()
    step()
print("--")
told(lambda: (optimizers[0].step(), [one.sum() for one in model.parameters()]))
"""
    (_, first), (_, second) = programs(tmp_path, body)
    assert QUOTED in first and "KeyboardInterrupt" in first
    assert LOST in second


@pytest.mark.ranks
def test_who_is_stopped_while_it_clips_has_lost_its_place(tmp_path: Path) -> None:
    body = """
step()
if rank == 1:
    soon()
    stopped(lambda: sync.clip_grad_norm_(1.0))
else:
    when_stopped()
    sync.clip_grad_norm_(1.0)
print("--")
told(lambda: sync.clip_grad_norm_(1.0))
print("--")
told()
"""
    (_, *rest), (_, *own) = programs(tmp_path, body, keep=False)
    assert QUOTED in rest[0] and "KeyboardInterrupt" in rest[0]
    assert all(QUOTED in one or LOST in one for one in rest)
    assert all(LOST in one for one in own)


RANK_1_IS_STOPPED = """
if rank == 1:
    soon()
    stopped(step)
else:
    when_stopped()
    until_known(1)
print("--")
"""
"""In a pass of the first model; what follows is told behind it."""


def assert_refused(told: list[list[str]]) -> None:
    """By each rank, since rank 1 has lost its place."""
    for rank, (_, text) in enumerate(told):
        assert (f"this rank {STOPPED}" if rank else f"rank 1 {STOPPED}") in text or QUOTED in text


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "keep"), [("optimizers[1].step", True), ("lambda: other.clip_grad_norm_(1.0)", False)]
)
def test_nothing_of_another_model_is_sent_over_a_group_in_which_a_pass_was_left(
    tmp_path: Path, what: str, keep: bool
) -> None:
    body = f"""
pass_of(second)
{RANK_1_IS_STOPPED}
told({what})
assert all(map(torch.equal, before, second.parameters()))
"""
    assert_refused(programs(tmp_path, body, keep=keep))


@pytest.mark.ranks
def test_nothing_is_sent_over_a_group_in_which_a_rank_has_lost_its_place_in_a_step(tmp_path: Path) -> None:
    body = """
step()
Breaks.fails = rank == 1
told(optimizers[0].step)
print("--")
told(lambda: pass_of(second))
"""
    (_, first), (failed, own) = programs(tmp_path, body)
    assert "MemoryError" in failed
    assert own.startswith("CommunicationError") and own.endswith(
        " s: " + LOST_ELSEWHERE.format(1, 2, "MemoryError: no memory")
    )
    assert QUOTED in first and "MemoryError: no memory" in first


@pytest.mark.ranks
def test_a_step_that_fails_alike_on_all_ranks_leaves_nothing_for_who_attaches_again(tmp_path: Path) -> None:
    """For want of memory, say: a search goes on over the same group with a smaller model."""
    body = """
step()
Breaks.fails = True
told(optimizers[0].step)
Breaks.fails = False
print("--")
sync.detach(), other.detach()
third = torch.nn.Linear(3, 2)
optimizer = stretto.shard(Breaks(third.parameters(), lr=0.1), stretto.attach(third, transport=transport))
told(lambda: (pass_of(third), optimizer.step(), third.weight.sum()))
"""
    for failed, later in programs(tmp_path, body):
        assert "MemoryError" in failed
        assert later == ""


@pytest.mark.ranks
def test_who_is_stopped_while_a_state_is_summed_has_lost_its_place(tmp_path: Path) -> None:
    body = """
if rank == 1:
    def stop(work, what, patience=None):
        raise KeyboardInterrupt

    sync._reducer.queue.wait_for = stop
    stopped(optimizers[0].state_dict)
else:
    told(optimizers[0].state_dict)
print("--")
told()
"""
    (_, first), (_, second) = programs(tmp_path, body)
    assert QUOTED in first and "KeyboardInterrupt" in first
    assert LOST in second


@pytest.mark.ranks
def test_who_is_stopped_while_it_sends_a_bucket_does_not_send_it_again(tmp_path: Path) -> None:
    """It cannot know whether it has left: Python calls a signal's handler when the call returns, and drops the result.

    Else it was one message ahead from there on, and Gloo ended the other rank, where sizes differed.
    """
    body = """
if rank == 1:
    def stop(work):
        del in_flight.add
        raise KeyboardInterrupt

    in_flight = sync._reducer.queue.transport._in_flight
    in_flight.add = stop
    stopped(step)
else:
    told()
print("--")
told()
"""
    (first, _), (own, later) = programs(tmp_path, body)
    assert QUOTED in first and "KeyboardInterrupt" in first
    assert own == "stopped" and LOST in later


@pytest.mark.ranks
def test_ctrl_c_while_a_parameter_is_awaited_leaves_nothing_behind(tmp_path: Path) -> None:
    """Whoever reads next waits for it again, so other models may go on over the group."""
    body = """
step()
if rank == 0:
    time.sleep(1.5)
optimizers[0].step()
if rank == 1:
    soon()
    stopped(model.state_dict)
print("--")
for _ in range(2):
    step()
    pass_of(second)
    [one.step() for one in optimizers]
torch.testing.assert_close(second.weight.grad, torch.full((1, 3), 2.0))
time.sleep(2.5)  # until a note would have been read
told(lambda: pass_of(second))
"""
    (_, first), (stopped, second) = programs(tmp_path, body)
    assert stopped == "stopped"
    assert first == second == ""


@pytest.mark.ranks
def test_a_step_that_all_ranks_refuse_is_no_reason_to_leave_them(tmp_path: Path) -> None:
    """Later a rank is slow, and what the other has told of that step is read."""
    body = """
step()
model.double()
told(optimizers[0].step)
model.float()
print("--")
for turn in range(4):
    if rank == 1 and turn == 2:
        time.sleep(1.5)
    told()
    told(optimizers[0].step)
sum(one.sum() for one in model.parameters())
"""
    for refused, later in programs(tmp_path, body):
        assert "SetupError" in refused
        assert later == ""


@pytest.mark.ranks
def test_a_rank_that_refuses_a_step_alone_is_heard_before_the_first_pass(tmp_path: Path) -> None:
    body = """
third = torch.nn.Linear(3, 2)
optimizer = stretto.shard(Breaks(third.parameters(), lr=0.1), stretto.attach(third, transport=transport))
if rank == 1:
    third.double()
told(lambda: (optimizer.step(), third.weight.sum()))
"""
    (first,), (own,) = programs(tmp_path, body)
    assert QUOTED in first and "SetupError" in first
    assert own.startswith("SetupError")


@pytest.mark.ranks
def test_a_rank_that_refuses_another_step_alone_behind_the_same_pass_is_heard(tmp_path: Path) -> None:
    """The first of these steps was refused by all, and is no reason to leave."""
    body = """
step()
model.double()
told(optimizers[0].step)
print("--")
if rank == 0:
    model.float()
told(lambda: (optimizers[0].step(), [one.sum() for one in model.parameters()]))
"""
    (refused, second), (own_refused, own) = programs(tmp_path, body)
    assert all(one.startswith("SetupError") for one in (refused, own_refused, own))
    assert second.startswith("PeerError") and QUOTED in second


@pytest.mark.ranks
def test_behind_ranks_that_have_gone_apart_no_comm_hook_sends_for_another_model(tmp_path: Path) -> None:
    """What hooks send goes over the process group, whatever carries the rest, and is told nowhere there."""
    body = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

[one.unshard() for one in optimizers]
third = torch.nn.Linear(3, 1)
pair = [second, third]
stretto.attach(third, transport=transport).register_comm_hook(None, allreduce_hook)
other.register_comm_hook(None, allreduce_hook)
for _ in range(2):
    [pass_of(one) for one in pair]
stretto.inquiry.ASK_SECONDS = 0.3
if rank == 1:
    pair.reverse()
for one in pair:
    told(lambda: pass_of(one))
    assert one.weight.grad is None
    print("--")
"""
    for met, behind, _ in programs(tmp_path, body, transport="shared_memory"):
        assert "ranks are out of step" in met
        assert "this rank has lost its place in what another handle does" in behind or QUOTED in behind


@pytest.mark.ranks
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_rank_whose_comm_hook_fails_sends_nothing_for_another_model_either(
    tmp_path: Path, hooked: bool, together: bool, transport: str
) -> None:
    """The hook fails again as the pass is given up. What the others' hooks have sent is still under way in the group,
    and Gloo would end a rank where it meets something else."""
    body = f"""
[one.unshard() for one in optimizers]
fails = False


def hook(state, bucket):
    if fails:
        raise ValueError("hook broke")
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])


def both():
    (model(x).sum() + second(torch.ones(2, 3)).sum()).backward()


hooked, plain = [model, second][:: 1 if {hooked} else -1]
(sync if {hooked} else other).register_comm_hook(None, hook)
for _ in range(2):
    [pass_of(one) for one in (model, second)]
    both()
fails = rank == 1
told(both if {together} else lambda: pass_of(hooked))
print("--")
told(lambda: pass_of(hooked))
print("--")
told(lambda: pass_of(plain))
"""
    (failed, again, elsewhere), (own, own_again, own_elsewhere) = programs(tmp_path, body, transport=transport)
    assert "ValueError: hook broke" in failed and QUOTED in failed
    assert own.startswith("ValueError") and "hook broke" in own
    assert LOST in again and LOST in own_again
    if transport == "shared_memory":
        assert (elsewhere, own_elsewhere) == ("", "")
    else:
        assert QUOTED in elsewhere or LOST in elsewhere
        assert "lost its place in what another handle does" in own_elsewhere or LOST in own_elsewhere


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_backward_of_two_models_that_fails_is_quoted_at_once(tmp_path: Path, transport: str) -> None:
    """The rank that failed stays with both passes, and the others are to hear why in the end of the first."""
    body = """
[one.unshard() for one in optimizers]
told(lambda: (model(x, fail=rank == 1) + second(torch.ones(2, 3)).sum()).backward())
told()
"""
    (quoted,), (own,) = programs(tmp_path, body, transport=transport)
    assert "ValueError: bad label" in within(quoted, "PeerError", 1.5)
    assert "bad label" in within(own, "ValueError", 1.5)


@pytest.mark.ranks
def test_a_recorded_group_refuses_as_the_group_itself_does(tmp_path: Path) -> None:
    """What was left in it is known to every transport over it: else the other's messages meet, and Gloo ends a rank."""
    body = f"""
from stretto.testing import RecordingTransport

inner = stretto.transport.ProcessGroupTransport()
recorded = RecordingTransport(inner)
assert recorded.leftovers is inner.leftovers
[one.unshard() for one in optimizers]
sync.detach(), other.detach()
for one in (model, second):
    stretto.attach(one, transport=recorded)
for _ in range(2):
    step()
    pass_of(second)
{RANK_1_IS_STOPPED}
told(lambda: pass_of(second))
"""
    assert_refused(programs(tmp_path, body))


@pytest.mark.parametrize("garbage", [100.0, float("nan"), -1.0])
def test_what_is_no_footer_is_taken_for_none(garbage: float) -> None:
    marks = [0.0, 2.0] * (MARKS // 2)
    said = torch.tensor([0.0] * len(Control) + marks + [0.0] * VALUES)
    assert not ControlWords(said, marks=marks).are_mixed
    said[Control.LATE], said[FIRST_VALUE - 1] = 1, garbage
    words = ControlWords(said, marks=marks)
    assert words.are_mixed and not words.ask_for_second_round(is_first=False)


def test_who_cannot_give_up_a_pass_stays_with_those_of_the_other_models() -> None:
    family, heard = Family.__new__(Family), []

    def member(name: str, fails: type[BaseException] | None = None) -> Any:
        def raises() -> None:
            heard.append(name)
            if fails is not None:
                raise fails

        failing = SimpleNamespace(stay=lambda: heard.append(f"{name} stays"), behind=lambda _, give_up, *__: give_up())
        presence = SimpleNamespace(active=False)
        queue = SimpleNamespace(events=Events(0), pass_number=1, waits_within=False, comm_hook=None, presence=presence)
        return SimpleNamespace(running=True, settle=raises, give_up=raises, failing=failing, family=family, queue=queue)

    members = [member("first", ValueError), member("second", KeyboardInterrupt), member("third")]
    for one in members:
        one.running = one.running and one is not members[0]
    vars(family).update(_reached=lambda: members, lose_with=lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        family.settle()
    assert heard == ["first", "second", "third", "second stays", "third stays"]


@pytest.mark.ranks
def test_who_is_stopped_in_a_pass_after_one_that_failed_at_its_end_has_lost_its_place(tmp_path: Path) -> None:
    """Of the pass before all knew; of this one nobody would."""
    body = """
import contextlib, unittest.mock

[one.unshard() for one in optimizers]
full = unittest.mock.patch.object(sync._reducer.tracker, "contributed", side_effect=MemoryError("no room"))
with full if rank == 1 else contextlib.nullcontext():
    told(step)
print("--")
if rank == 1:
    soon()
    stopped(step)
else:
    when_stopped()
    told(step)
print("--")
told(step)
"""
    (failed, stopped, later), (own, own_stopped, own_later) = programs(tmp_path, body)
    assert "MemoryError: no room" in within(failed, "PeerError", 1.5) and "no room" in within(own, "MemoryError", 1.5)
    assert (stopped, own_stopped) == ("", "stopped")
    quoted = within(later, "PeerError", 2)
    assert QUOTED in quoted and "KeyboardInterrupt" in quoted
    assert LOST in within(own_later, "CommunicationError", 1)
