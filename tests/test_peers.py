"""What the other ranks learn when one fails, ends, dies or does not come. Each rank is a program of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_programs
from test_shared_memory import shared

import stretto
from stretto.awaited_keys import AwaitedKeys
from stretto.blame import SAME_CALLS, left_early
from stretto.channel import LINGER_SECONDS, Channel
from stretto.engine import when_raised
from stretto.inquiry import Inquiry
from stretto.line import POLL_SECONDS
from stretto.notes import OF_A_KIND, WAYS_TO_LEAVE, Note, last_words, still_of_use, text_of, what_ends_this_process
from stretto.peers import Peers
from stretto.seat import Answer, Seat
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import LocalTransport
from stretto.transport.base import Leftover
from stretto.transport.letting_go import InFlight
from stretto.transport.life import is_over, started_at
from stretto.waiting import this_thread
from stretto.whereabouts import is_users, others_work, standing

pytestmark = pytest.mark.timeout(60)

PRELUDE = """
import datetime, gc, os, signal, sys, threading, time
import torch, torch.distributed as dist
import stretto

torch.set_num_threads(1)
folder, rank, world, meeting, patience = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], float(sys.argv[5])
transport = sys.argv[6]
if meeting == "file":
    store = dist.FileStore(f"{folder}/store", world)
else:  # rank 0 has the server, as without torchrun
    port = f"{folder}/port"
    while rank and not os.path.exists(port):
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(open(port).read()) if rank else 0, world, not rank, wait_for_workers=False)
    if not rank:
        open(port + "~", "w").write(str(store.port))
        os.rename(port + "~", port)
# To start takes longer on a busy machine than what then waits in vain may.
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=100))
change = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout  # before 2.14
change(datetime.timedelta(seconds=patience))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.fail:
            raise ValueError("bad label")
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

    def forward(self, x, before=False, fail=False, wrong=False):
        if wrong:
            raise KeyError("no such token")
        loss = self.b(Fails.apply(self.a(x), fail)).sum()
        return Fails.apply(loss, before)


torch.manual_seed(0)
model = Model()
x = torch.full((2, 3), 1.0 + rank)
sync = stretto.attach(model, bucket_cap_mb=1e-5, transport=transport)


def step(**how):
    model.zero_grad()
    model(x, **how).backward()


def told(do=None, **how):
    began = time.monotonic()
    try:
        do() if do else step(**how)
    except Exception as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)
    with open(f"{folder}/pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.replace(file.name, f"{folder}/told{rank}")


def hang(*_, **__):
    # Until all the others have told what they have to tell, and have ended: Gloo can abort who is left. At most
    # 1.5 s more, since one with Gloo's work under way cannot end before this rank does.
    for other in set(range(world)) - {rank}:
        while not os.path.exists(f"{folder}/told{other}"):
            time.sleep(0.02)
        pid = open(f"{folder}/told{other}").read()
        until = time.monotonic() + 1.5
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
            time.sleep(0.02)


def stay(but=None):
    # Until all others have come here, but for one that never will: who ends before is news itself.
    open(f"{folder}/stays{rank}", "w").close()
    for other in set(range(world)) - {rank, but}:
        while not os.path.exists(f"{folder}/stays{other}"):
            time.sleep(0.02)


def until_told(other):
    while not os.path.exists(f"{folder}/told{other}"):
        time.sleep(0.02)


def until_known(other):
    # By the thread that reads the store once a second: that rank has left, or has left something in the group.
    def known():
        threads = [one for one in threading.enumerate() if one.name == "stretto"]
        notes = [note for one in threads for note in one.channel.notes]
        return any(note.rank == other and (note.leaves or note.leftover) for note in notes)

    while not known():
        time.sleep(0.02)
    time.sleep(0.1)  # until it has drawn its conclusions


def right():
    reference = Model()
    reference.load_state_dict(model.state_dict())
    sum(reference(torch.full((2, 3), 1.0 + r)) for r in range(world)).div(world).backward()
    for mine, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, wanted.grad)
"""


def ranks(
    folder: Path,
    body: str,
    world: int = 2,
    meeting: str = "file",
    patience: float = 100.0,
    end: bool = True,
    transport: str = "auto",
):
    """Exit code, what was printed and what was complained of, for each rank."""
    script = folder / "train.py"
    ending = "\ndist.destroy_process_group()\n" if end else ""
    script.write_text(PRELUDE + textwrap.dedent(body) + ending)
    programs = [
        warm_programs.start(
            [script, folder, rank, world, meeting, patience, transport],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            to_the_end=not end,
        )
        for rank in range(world)
    ]
    try:
        said = [program.communicate(timeout=50) for program in programs]
    finally:
        for program in programs:
            program.kill()
    for _, complaint in said:
        assert "terminate called" not in complaint, complaint
    return [(program.returncode, *words) for program, words in zip(programs, said, strict=True)]


def plain(text: str) -> str:
    """Without what differs from run to run: line numbers, pids."""
    return re.sub(r"pid \d+", "pid PID", re.sub(r"\.py:\d+ in", ".py:LINE in", text))


def within(text: str, kind: str, seconds: float) -> str:
    """What one ``told`` printed, once it is sure that it was an error of that kind and came soon enough."""
    found = re.match(r"(\w+) after ([\d.]+) s: ", text)
    assert found and found[1] == kind and float(found[2]) < seconds, text
    return plain(text[found.end() :]).removesuffix("\n")


LACKS = (
    "rank {0}, pass 2: backward failed on rank 1, so the mean of this pass lacks gradients.\n"
    "  rank 1, pass 2, backward: ValueError: bad label (train.py:LINE in backward)\n"
    "Do not step with these gradients: zero_grad() and go on, on all ranks."
)
LEFT = (
    "rank {0}, pass {1}: rank 1 failed and left, so nobody can complete this pass.\n"
    "  rank 1, pass 2, {2}\n"
    "Remove the cause and start again, on all ranks."
)
DIED = (
    "rank {0}, pass 2: rank 1 (pid PID) died without a word, so nobody can complete this pass.\n"
    "Something killed it: a signal, os._exit(), a crash outside Python (Gloo, where ranks have sent different "
    "things), or the system because memory ran out (see dmesg). Start again, on all ranks."
)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "meeting"), [(2, "tcp"), (3, "file")])
def test_a_backward_that_fails_and_is_caught_is_quoted_and_the_next_pass_is_right(
    tmp_path: Path, world: int, meeting: str
) -> None:
    body = """
        step(); right()
        told(fail=rank == 1)
        step(); right()
    """
    found = ranks(tmp_path, body, world, meeting)
    assert [code for code, _, _ in found] == [0] * world, found
    for rank, (_, printed, complaint) in enumerate(found):
        assert complaint == ""
        if rank == 1:
            assert within(printed, "ValueError", 1) == "bad label"
        else:
            assert within(printed, "PeerError", 2) == LACKS.format(rank)


@pytest.mark.ranks
def test_a_backward_that_fails_on_every_rank_and_is_caught(tmp_path: Path) -> None:
    found = ranks(tmp_path, "step(); told(fail=True); step(); right()")
    for code, printed, complaint in found:
        assert (code, complaint) == (0, ""), complaint
        assert within(printed, "ValueError", 1) == "bad label"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "quoted", "world", "meeting"),
    [
        ("wrong=True", "forward: KeyError: 'no such token' (train.py:LINE in forward)", 2, "file"),
        ("wrong=True", "forward: KeyError: 'no such token' (train.py:LINE in forward)", 3, "tcp"),
        ("before=True", "backward: ValueError: bad label (train.py:LINE in backward)", 2, "tcp"),
        ("fail=True", "backward: ValueError: bad label (train.py:LINE in backward)", 3, "file"),
    ],
    ids=["forward", "forward, three ranks", "before the first gradient", "amid backward"],
)
def test_a_program_that_ends_by_an_exception_is_quoted(
    tmp_path: Path, how: str, quoted: str, world: int, meeting: str
) -> None:
    body = f"""
        step()
        told() if rank != 1 else step({how})
    """
    found = ranks(tmp_path, body, world, meeting)
    assert found[1][0] == 1
    for rank in {0, 2} & set(range(world)):
        code, printed, _ = found[rank]
        assert code == 0, found[rank]
        wanted = {LEFT.format(rank, 2, quoted)} | ({LACKS.format(rank)} if how == "fail=True" else set())
        assert within(printed, "PeerError", 4) in wanted


@pytest.mark.ranks
@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_of_a_group_of_exceptions_the_first_is_quoted(tmp_path: Path) -> None:
    body = """
        step()
        if rank == 0:
            told()
        else:
            import asyncio
            async def train():
                step(wrong=True)
            async def program():
                async with asyncio.TaskGroup() as group:
                    group.create_task(train())
            asyncio.run(program())
    """
    (code, printed, _), (failed, _, _) = ranks(tmp_path, body)
    assert (code, failed) == (0, 1)
    quoted = "forward: KeyError: 'no such token' (train.py:LINE in forward)"
    assert within(printed, "PeerError", 4) == LEFT.format(0, 2, quoted)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("when", "world", "meeting"), [("amid backward", 2, "tcp"), ("amid backward", 3, "file"), ("between", 2, "file")]
)
def test_a_killed_process_is_named(tmp_path: Path, when: str, world: int, meeting: str) -> None:
    body = f"""
        step()
        if rank == 1 and {when == "between"}:
            os.kill(os.getpid(), signal.SIGKILL)
        told(fail="kill" if rank == 1 else False)
        assert [one.grad for one in model.parameters()] == [None] * 4  # no mean, and Gloo may be writing there
    """
    found = ranks(tmp_path, body, world, meeting)
    assert found[1][0] == -signal.SIGKILL
    for rank in {0, 2} & set(range(world)):
        assert found[rank][0] == 0, found[rank]
        assert within(found[rank][1], "PeerError", 3) == DIED.format(rank)


@pytest.mark.ranks
def test_who_is_killed_while_memory_is_short_is_told_so(tmp_path: Path) -> None:
    """The kernel's count is that of all processes of the machine, so here it is written down."""
    body = """
        from stretto import people
        step()
        people.kills_for_want_of_memory = lambda: 2**40
        told(fail="kill" if rank == 1 else False)
    """
    found = ranks(tmp_path, body)
    assert within(found[0][1], "PeerError", 3) == (
        "rank 0, pass 2: rank 1 (pid PID) died without a word, so nobody can complete this pass.\n"
        "Something killed it: a signal, os._exit(), a crash outside Python (Gloo, where ranks have sent different "
        "things), or the system because memory ran out (see dmesg): it has killed some process on this machine "
        "since this rank attached. Start again, on all ranks."
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("transport", "after"), [("auto", 1.5), ("process_group", 0.0)])
def test_the_rank_that_has_the_store_is_killed(tmp_path: Path, transport: str, after: float) -> None:
    body = f"""
        step()
        time.sleep({after})
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        told()
    """
    found = ranks(tmp_path, body, 2, "tcp", transport=transport)
    assert found[1][0] == 0, found
    assert within(found[1][1], "PeerError", 3) == DIED.replace("rank 1 (pid", "rank 0 (pid").format(1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "early", "meeting"),
    [
        ("its process has ended", 0, "tcp"),
        ("its process has ended", 1, "file"),
        ("it was detached", 1, "tcp"),
        ("its model was dropped", 1, "tcp"),
    ],
)
def test_uneven_numbers_of_batches(tmp_path: Path, how: str, early: int, meeting: str) -> None:
    body = f"""
        for number in range(3 if rank == {early} else 5):
            told()
            if number > 2:
                break
        if {how == "it was detached"}:
            sync.detach()
            hang()
        if {how == "its model was dropped"}:
            del model, sync
            gc.collect()
            hang()
    """
    found = ranks(tmp_path, body, 2, meeting)
    other = 1 - early
    assert found[early][:2] == (0, ""), found
    assert within(found[other][1], "PeerError", 3) == (
        f"rank {other}, pass 4: rank {early} finished after 3 passes ({how}), so nobody can complete this one.\n"
        "Give every rank the same number of batches, or use the drop-in and its join(): with model.join(): ... If they "
        "had the same number, that rank skipped one (continue, except), or this rank took one twice, or an exception "
        "or an early end has taken that rank out of its loop: see its log."
    )


@pytest.mark.ranks
def test_the_rank_that_has_the_store_fails_while_the_others_compute(tmp_path: Path) -> None:
    body = """
        step()
        if rank == 1:
            time.sleep(5)
        told() if rank else step(wrong=True)
    """
    found = ranks(tmp_path, body, 2, "tcp")
    assert (found[0][0], found[1][0], found[1][2]) == (1, 0, ""), found
    assert within(found[1][1], "PeerError", 3) == (
        "rank 1, pass 2: rank 0 failed and left, so nobody can complete this pass.\n"
        "  rank 0, pass 2, forward: KeyError: 'no such token' (train.py:LINE in forward)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("transport", "over"),
    [("auto", "shared_memory: not done within 5 s"), ("process_group", "process_group (gloo): ")],
)
def test_a_rank_that_does_not_come_is_named_with_its_place(tmp_path: Path, transport: str, over: str) -> None:
    body = """
        def evaluate():
            while not os.path.exists(f"{folder}/told0"):
                time.sleep(0.1)
            time.sleep(1.5)

        stretto.inquiry.ASK_SECONDS = 1.5
        step()
        told() if rank == 0 else evaluate()
    """
    (code, printed, complaint), other = ranks(tmp_path, body, patience=5.0, transport=transport)
    assert code == 0 and other == (0, "", "")
    assert re.fullmatch(
        r"stretto: rank 0, pass 2: rank 0 has waited \d s at train.py:LINE in step; rank 1 has begun 1 pass and is "
        r"at train.py:LINE in evaluate.\n",
        plain(complaint),
    ), complaint
    text = within(printed, "CommunicationError", 9)
    first, *rest = text.splitlines()
    assert first.startswith(f"rank 0, pass 2: bucket 0 (b.bias) could not be reduced over {over}"), text
    assert rest[-2:] == [
        "rank 0 waits at train.py:LINE in step; rank 1 has begun 1 pass and is at train.py:LINE in evaluate.",
        "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs.",
    ]


IN_TORCHS = """
    pair = dist.new_group(sorted(set((1, world - 1))))
    step()
    stretto.inquiry.ASK_SECONDS, stretto.inquiry.REPEATS = 0.3, 4
    if rank:
        threading.Thread(target=lambda: (until_told(0), os._exit(0)), daemon=True).start()
        {0}
        time.sleep(100)
    told({1})
"""
HAS_GONE_ON = (
    "All ranks make this call: look for a loop that another rank has left (fewer batches, or a break of its own), "
    "for a condition around the call (if rank == 0), or for a call of torch.distributed in which it waits first."
)


SAME_BATCHES = (
    "Give every rank the same number of batches, or use the drop-in and its join(): with model.join(): ... If they had "
    "the same number, look for a loop that one of them has left by a value of its own (decide together, by "
    "stretto.reduce([value])), or for a call of torch.distributed that only some make, as under `if rank == 0`."
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("call", "waits", "when", "where"),
    [
        ("dist.barrier()", "", "pass 2", "at train.py:LINE in step"),
        ("dist.all_gather_object([None] * 2, 0)", "", "pass 2", "at train.py:LINE in step"),
        ("dist.all_reduce(x, group=dist.group.WORLD)", "", "pass 2", "at train.py:LINE in step"),
        ("dist.barrier()", "sync.report", "pass 1", "in report() at train.py:LINE in told"),
        ("dist.broadcast(x, src=0)", "", "pass 2", "at train.py:LINE in step"),
        ("dist.scatter(x, group_src=0)", "", "pass 2", "at train.py:LINE in step"),
        ("dist.broadcast_object_list([0])", "sync.report", "pass 1", "in report() at train.py:LINE in told"),
    ],
)
def test_a_rank_that_waits_in_a_collective_of_torchs_never_comes(
    tmp_path: Path, call: str, waits: str, when: str, where: str
) -> None:
    """As after a loop that had fewer batches there. Else the time-out of the group, half an hour, is the end."""
    (code, printed, complaint), _ = ranks(tmp_path, IN_TORCHS.format(call, waits), patience=30.0)
    name = call[: call.index("(")].replace("dist.", "torch.distributed.")
    now = f"rank 1 has begun 1 pass and is in {name}() at train.py:LINE in <module>.\n"
    told = re.sub(r"waited \d s", "waited N s", plain(complaint))
    assert (code, told) == (0, f"stretto: rank 0, {when}: rank 0 has waited N s {where}; {now}{HAS_GONE_ON}\n")
    assert re.sub(r"waited \d s", "waited N s", within(printed, "PeerError", 9)) == (
        f"rank 0, {when}: ranks are out of step, so nobody can complete this: rank 1 waits for this rank in another "
        f"call.\nrank 0 has waited N s {where}; {now}{SAME_CALLS if waits else SAME_BATCHES}"
    )


@pytest.mark.ranks
def test_ranks_that_all_receive_wait_for_the_source(tmp_path: Path) -> None:
    """As where rank 0 alone saves the state of a sharded optimizer, and then tells the others the name of the file."""
    body = IN_TORCHS.format("dist.broadcast(x, src=0)", "sync.report")
    (code, printed, complaint), *_ = ranks(tmp_path, body, 3, patience=30.0)
    assert code == 0, complaint
    assert "ranks are out of step" in within(printed, "PeerError", 12)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "call",
    [
        "rank == 1 and dist.barrier(pair)",  # the other of the pair is late
        "dist.recv(x, src=0)",
        "rank == 1 and pair and dist.broadcast(x, src=0)",  # the source may have left it, and the third be late
        "threading.Thread(target=time.sleep, args=[9]).start(); dist.barrier()",  # which may train as well
    ],
)
def test_a_rank_that_waits_otherwise_may_come(tmp_path: Path, call: str) -> None:
    world = 2 + ("pair" in call)
    (code, printed, complaint), *_ = ranks(tmp_path, IN_TORCHS.format(call, ""), world, patience=6.0)
    assert code == 0, complaint
    assert "Error after" in printed and "out of step" not in printed, "in the group's own time"


@pytest.mark.ranks
def test_a_thread_may_make_the_call_that_another_rank_waits_for(tmp_path: Path) -> None:
    """As one that writes a checkpoint. Those of a pool are daemons."""
    body = """
        from multiprocessing.pool import ThreadPool

        def save():
            time.sleep(6 * (rank == 0))
            dist.barrier(saved)

        saved = dist.new_group()
        step()
        stretto.inquiry.ASK_SECONDS, stretto.inquiry.REPEATS = 0.3, 4
        with ThreadPool(1) as pool:
            job = pool.apply_async(save) if rank == 0 else save()
            step()
            print(sync.statistics.passes)
            job and job.get()
    """
    for code, printed, complaint in ranks(tmp_path, body):
        assert (code, printed) == (0, "2\n"), complaint


@pytest.mark.ranks
def test_a_rank_that_comes_late_to_a_collective_of_torchs_is_looked_at_again(tmp_path: Path) -> None:
    """After an evaluation, say. The looks are ever rarer; that one is not."""
    body = IN_TORCHS.format("time.sleep(1); dist.barrier()", "").replace("REPEATS = 0.3, 4", "REPEATS = 0.3, 8")
    (code, printed, complaint), _ = ranks(tmp_path, body, patience=30.0)
    assert code == 0, complaint
    assert "rank 1 waits for this rank in another call" in within(printed, "PeerError", 12)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_the_traceback_of_who_waited_in_vain_is_short(tmp_path: Path, transport: str) -> None:
    """What is to be read is the other's error: neither how it was waited for, nor what the transport says of it."""
    body = """
        step()
        if rank == 1:
            raise ValueError("bad sample")
        step()
    """
    (code, _, complaint), _ = ranks(tmp_path, body, transport=transport, end=False)
    assert code == 1
    lines = [one for one in complaint.splitlines() if one.startswith("[rank0]:")]
    files = re.findall(r'File ".*?([\w.]+)"', "\n".join(lines))
    assert [file for file in files if file not in ("_tensor.py", "__init__.py", "graph.py")] == [
        "warm_programs.py",
        "train.py",
        "train.py",
        "engine.py",
    ]
    assert lines[-3].startswith("[rank0]: stretto.errors.PeerError: rank 0, pass 2: rank 1 failed and left")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("call", "transport"),
    [
        ("sync.report()", "auto"),
        ("sync.report()", "process_group"),
        ("sync.check()", "process_group"),
        ("stretto.attach(torch.nn.Linear(2, 2))", "auto"),
        ("stretto.DistributedDataParallel(torch.nn.Linear(2, 2))", "auto"),
        ("sync.trace('traces').__enter__()", "auto"),
    ],
)
def test_a_call_that_one_rank_alone_makes_does_not_meet_another(tmp_path: Path, call: str, transport: str) -> None:
    """Gloo ends the process where two messages differ in size, and sums what should not be where they do not."""
    body = f"""
        step()
        step()
        stretto.inquiry.ASK_SECONDS = 0.5
        told(lambda: {call}) if rank == 0 else told()
        stay()
        os._exit(0)
    """
    found = ranks(tmp_path, body, transport=transport)
    assert [code for code, _, _ in found] == [0, 0]
    texts = [within(printed, "PeerError", 9) for _, printed, _ in found]
    for text in texts:
        assert "ranks are out of step, so nobody can complete this" in text
        assert "All ranks must make the same calls in the same order." in text
        name = call[call.index(".") + 1 : call.index("(")]
        assert re.search(rf"rank 0 [\w ]*in {name}\(\) at train.py:LINE in <lambda>", text), text


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_ranks_that_call_two_different_things_are_told_which(tmp_path: Path, transport: str) -> None:
    body = """
        step()
        told(lambda: sync.report() if rank == 0 else sync.check())
        step()  # nothing was sent, nothing is lost
        right()
        sync.check()
    """
    for rank, (code, printed, _) in enumerate(ranks(tmp_path, body, transport=transport)):
        assert code == 0
        assert within(printed, "CommunicationError", 2) == (
            f"rank {rank}, pass 1: ranks have made different calls: rank 0 is in report() at train.py:LINE in "
            "<lambda>; rank 1 is in check() at train.py:LINE in <lambda>.\n"
            "All ranks must make the same calls in the same order. Look for a call that only some of them make, as "
            "under `if rank == 0` or after a `continue` or a `break`: attach(), shard(), backward, optimizer.step(), "
            "clip_grad_norm_(), check(), report(), trace(), state_dict(), load_state_dict(), unshard(), "
            "stretto.reduce()."
        )


OTHER_CALLS = {
    "a pass for an attach": "told(lambda: stretto.attach(torch.nn.Linear(2, 2), transport=transport))",
    "two models in another order": "told(lambda: second(torch.ones(1, 2)).sum().backward())",
}


@pytest.mark.ranks
@pytest.mark.parametrize(("call", "threads"), [*((call, 1) for call in OTHER_CALLS), ("a pass for an attach", 2)])
def test_ranks_that_wait_for_each_other_in_two_places_are_told(tmp_path: Path, call: str, threads: int) -> None:
    """Each would wait until the limit of the process group is over, half an hour. Threads may each have an order."""
    body = f"""
        import threading

        second = torch.nn.Linear(2, 1)
        stretto.attach(second, transport=transport)
        for _ in range(2):
            step()
            second(torch.ones(1, 2)).sum().backward()
        stretto.inquiry.ASK_SECONDS = 0.5
        going = threading.Event()
        if {threads} > 1:
            threading.Thread(target=going.wait, args=(30,)).start()
        if rank == 0:
            told()
        else:
            {OTHER_CALLS[call]}
        going.set()
        stay()
        os._exit(0)
    """
    found = ranks(tmp_path, body, patience=5.0 if threads > 1 else 100.0)
    if threads > 1:
        assert all("ranks are out of step" not in printed for _, printed, _ in found)
        return
    texts = [within(printed, "PeerError", 9) for _, printed, _ in found]
    first = next(rank for rank, text in enumerate(texts) if "in another call" in text)
    occasion = "pass 3" if first == 0 or "models" in call else "attach"
    assert re.fullmatch(
        rf"rank {first}, {occasion}: ranks are out of step, so nobody can complete this: rank {1 - first} waits for "
        r"this rank in another call.\n"
        rf"rank {first} waits [\w() ]*at train.py:LINE in [<\w>]+; rank {1 - first} [\w() ]*at train.py:LINE in "
        r"[<\w>]+.\n"
        r"All ranks must make the same calls in the same order. Look for a call that only some of them make, as "
        r"under `if rank == 0` or after a `continue` or a `break`: attach\(\), shard\(\), backward, "
        r"optimizer.step\(\), clip_grad_norm_\(\), check\(\), report\(\), trace\(\), state_dict\(\), "
        r"load_state_dict\(\), unshard\(\), stretto.reduce\(\).",
        texts[first],
    ), texts[first]


@pytest.mark.ranks
@pytest.mark.parametrize("inner_first", [False, True])
def test_a_backward_inside_another_that_one_rank_leaves_out_is_told(tmp_path: Path, inner_first: bool) -> None:
    """Both end with the outer one, so no count of passes crosses: each waits at the end of what the other is amid."""
    body = f"""
        class Inside(torch.autograd.Function):
            skips = False

            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                if not Inside.skips:
                    with torch.enable_grad():
                        inner(torch.ones(1, 2)).sum().backward()
                return gradient

        inner, outer = torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        for one in (inner, outer) if {inner_first} else (outer, inner):
            stretto.attach(one)

        def train():
            outer[1](Inside.apply(outer[0](torch.ones(1, 2)))).sum().backward()

        for _ in range(3):
            train()
        stretto.inquiry.ASK_SECONDS = 0.5
        Inside.skips = rank == 1
        told(train)
        Inside.skips = False
        told(train)
        hang()
        os._exit(0)
    """
    for _, printed, _ in ranks(tmp_path, body):
        assert "ranks are out of step, so nobody can complete this" in within(printed, "PeerError", 9)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "dtype", "how", "hooked"),
    [(2, "float32", "", False), (3, "bfloat16", ", init_sync=False", False), (2, "float32", "", True)],
)
def test_two_models_of_the_same_sizes_in_another_order_are_not_summed_with_each_other(
    tmp_path: Path, world: int, dtype: str, how: str, hooked: bool
) -> None:
    """Over a process group sums match by their order alone, and all that would be amiss are the numbers."""
    body = f"""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        second, third = (torch.nn.Linear(2, 2, dtype=torch.{dtype}) for _ in range(2))
        handles = [stretto.attach(one, transport=transport{how}) for one in (second, third)]
        if {hooked}:
            for one in handles:
                one.register_comm_hook(None, allreduce_hook)
        train = [lambda one=one: one(torch.ones(1, 2, dtype=torch.{dtype})).sum().backward() for one in (second, third)]
        for _ in range(3):
            [one() for one in train]
        if rank == 1:
            train.reverse()
        told(train[0])
        told(train[1])
        told()
        stay()
        os._exit(0)
    """
    found = ranks(tmp_path, body, world, transport="process_group")
    for rank, (_, printed, complaint) in enumerate(found):
        assert not complaint
        met, *rest = re.split(r"^(?=\w+Error after)", printed, flags=re.MULTILINE)[1:]
        own = (
            rf"rank {rank}, pass 4: gradients of weight, bias could not be reduced over process_group \(gloo\): they "
            rf"were summed with those of another attached model\nrank {rank} waits at train.py:LINE in <lambda>; "
            r"(rank \d [\w() ]*at train.py:LINE in <lambda>(; |\.\n))+"
            r"Expected every rank to call backward of the same models in the same order. Look at the first error in "
            r"the other ranks' logs."
        )
        quoted = rf"rank {rank}, pass 4: .* failed and left, so nobody can complete this pass\.\n(?s:.*)"
        kind = "CommunicationError" if "CommunicationError after" in met else "PeerError"
        text = within(met, kind, 9)
        assert re.fullmatch(own if kind == "CommunicationError" else quoted, text), text
        assert len(rest) == 1, printed
        for one in rest:
            assert "so it has lost its place among the others" in one or "so nobody can complete this" in one, one


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_a_rank_that_keeps_a_model_the_other_has_dropped_is_only_slow(tmp_path: Path, transport: str) -> None:
    """It has attached more often than the other, which counts anew when it has no handle any more."""
    body = """
        step()
        if rank:
            sync.detach()
        again = torch.nn.Linear(3, 1)
        stretto.attach(again, transport=transport)
        again(x).sum().backward()
        stretto.inquiry.ASK_SECONDS = 0.5
        if rank == 0:
            time.sleep(3)
        again(x).sum().backward()
        print("fine")
    """
    assert [printed for _, printed, _ in ranks(tmp_path, body, transport=transport)] == ["fine\n"] * 2


@pytest.mark.ranks
def test_who_waits_for_others_to_come_to_a_call_still_does_its_part_of_what_is_under_way(tmp_path: Path) -> None:
    """Memory is summed by those who wait: without the other's part the pass that it gave up never ends."""
    body = """
        stretto.failing.FLUSH_SECONDS = 0.2
        large = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        handle = stretto.attach(large)

        def both(fail):
            large[1](Fails.apply(large[0](torch.ones(1, 256)), fail)).sum().backward()

        both(False)
        if rank == 0:
            told(lambda: both(True))
        else:
            time.sleep(1)
            told(lambda: both(False))
        handle.check()
        both(False)
    """
    (code, mine, _), (other_code, other, _) = ranks(tmp_path, body, patience=8.0)
    assert (code, other_code) == (0, 0)
    assert within(mine, "ValueError", 2) == "bad label"
    assert "backward failed on rank 0" in within(other, "PeerError", 4)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "RuntimeError"])
def test_ctrl_c_before_the_others_have_come_to_a_call(tmp_path: Path, kind: str, transport: str) -> None:
    """Or whatever else a handler of signals raises."""
    body = f"""
        def interrupt(*_):
            raise {kind}

        step()
        if rank == 0:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                sync.check()
            except {kind}:
                open(f"{{folder}}/stopped", "w").close()
                told(sync.check)
        else:
            while not os.path.exists(f"{{folder}}/stopped"):
                time.sleep(0.01)
            told(sync.check)
        stay()
    """
    (_, mine, _), (_, other, _) = ranks(tmp_path, body, patience=10.0, transport=transport)
    assert within(mine, "CommunicationError", 1) == (
        "rank 0, pass 1: this rank has failed and left, so it has lost its place among the others.\n"
        f"  {kind}\nRemove the cause and start again, on all ranks."
    )
    assert re.fullmatch(
        r"rank 1, pass 1: rank 0 failed and left, so nobody can complete this call.\n"
        rf"  rank 0, pass 1, waiting: {kind}.*\nRemove the cause and start again, on all ranks.",
        within(other, "PeerError", 4),
    )


@pytest.mark.ranks
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_what_a_handler_of_signals_raises_does_not_stand_for_a_wait_that_lasts_too_long(
    tmp_path: Path, transport: str
) -> None:
    """It was swallowed, since a ``RuntimeError`` is what a wait in slices ends with."""
    body = """
        class TimeIsUp(RuntimeError):
            pass

        def raises(*_):
            raise TimeIsUp("of the job")

        step()
        if rank == 0:
            signal.signal(signal.SIGALRM, raises)
            signal.setitimer(signal.ITIMER_REAL, 0.8)
            told(step)
        else:
            time.sleep(2)
            told(step)
    """
    (_, mine, _), (_, other, _) = ranks(tmp_path, body, patience=10.0, transport=transport)
    assert within(mine, "TimeIsUp", 2) == "of the job"
    if transport == "process_group":  # in memory that they share rank 1 has all of so small a pass
        assert "TimeIsUp: of the job" in within(other, "PeerError", 4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "call",
    [
        "sync.check()",
        "optimizer.state_dict()",
        "sync.report()",
        "optimizer.step()",
        "sync.clip_grad_norm_(1.0)",
        "stretto.reduce([torch.ones(3)])",
        "stretto.attach(torch.nn.Linear(2, 2))",
    ],
)
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_a_handler_of_signals_makes_no_call_of_all_ranks_while_its_rank_waits(
    tmp_path: Path, transport: str, call: str
) -> None:
    """Over Gloo sizes did not match, which ended a rank by SIGABRT; or both stood in the call until the time-out."""
    body = f"""
        optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync, keep_grads=False)
        step()
        optimizer.step()
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: told(lambda: {call}))
            signal.setitimer(signal.ITIMER_REAL, 0.8)
        else:
            until_told(0)
        {{"auto": sync.check, "process_group": step}}[transport]()  # in shared memory so small a pass does not wait
        step()
        {call}
        optimizer.step()
        sync.check()
    """
    (status, mine, _), other = ranks(tmp_path, body, transport=transport)
    assert (status, other) == (0, (0, "", ""))
    when = f"pass {1 if transport == 'auto' else 2}"
    when = next((one for one in ("reduce", "attach") if f"stretto.{one}" in call), when)
    assert within(mine, "SetupError", 1) == (
        f"rank 0, {when}: a collective call was made while this rank waits inside another, for example by a signal "
        "handler.\n"
        "Let the handler set a flag, agree on it after the step, stretto.reduce([flag]), and make the call there."
    )


@pytest.mark.ranks
def test_a_handler_whose_refused_call_ends_a_backward_is_told_of(tmp_path: Path) -> None:
    """It was taken for an error that all ranks raise: the others went on with a pass that this one does not have."""
    body = """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step()
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: sync.check())
            signal.setitimer(signal.ITIMER_REAL, 0.8)
        else:
            time.sleep(2)
        told(step)
        told(step)
    """
    (_, mine, _), (_, other, _) = ranks(tmp_path, body, patience=10.0, transport="process_group")
    first, later = mine.split("CommunicationError after")
    assert within(first, "SetupError", 2).startswith("rank 0, pass 2: a collective call was made while")
    assert "this rank has failed and left, so it has lost its place among the others" in later
    assert "rank 0, pass 2, backward: SetupError: rank 0, pass 2: a collective call was made while" in other


@pytest.mark.ranks
@pytest.mark.parametrize(("meeting", "end", "late"), [("tcp", True, 2.5), ("tcp", True, 0), ("file", False, 2.5)])
def test_a_run_that_goes_well_ends_without_a_sound(tmp_path: Path, meeting: str, end: bool, late: float) -> None:
    body = f"""
        for _ in range(5):
            step()
        right()
        time.sleep({late} * rank)  # what answers looks for questions meanwhile
    """
    assert ranks(tmp_path, body, 2, meeting, end=end) == [(0, "", "")] * 2


@pytest.mark.ranks
def test_a_pass_that_goes_well_does_not_touch_the_store(tmp_path: Path) -> None:
    body = """
        def refuse(*_):
            raise AssertionError("the store was used")

        step()
        line = sync._reducer.queue.peers._channel.line
        line.lookout.stop()
        for name in ("add", "set", "get", "check", "wait"):
            setattr(type(line.store), name, refuse)
        for _ in range(5):
            step()
        right()
        os._exit(0)
    """
    assert ranks(tmp_path, body) == [(0, "", "")] * 2


def test_thread_ranks_are_told_that_one_was_detached() -> None:
    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        model(torch.ones(1, 2)).sum().backward()
        if transport.rank == 1:
            sync.detach()
            sync.detach()
            return ""
        began = time.monotonic()
        with pytest.raises(stretto.PeerError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        assert time.monotonic() - began < 2
        return str(caught.value)

    assert run_ranks(worker, 2)[0] == (
        "rank 0, pass 2: rank 1 finished after 1 pass (it was detached), so nobody can complete this one.\n"
        "Give every rank the same number of batches, or use the drop-in and its join(): with model.join(): ... If they "
        "had the same number, that rank skipped one (continue, except), or this rank took one twice, or an exception "
        "or an early end has taken that rank out of its loop: see its log."
    )


GIVEN_UP = """
    def once(value):
        model.zero_grad()
        (model.weight.sum() * value).backward()
        print("mean", *model.weight.grad.unique().tolist(), flush=True)

    sync.detach()
    model = torch.nn.Linear({width}, {width}, bias=False)
    sync = stretto.attach(model, transport="shared_memory")
    once(1.0)
    while rank == 1 and not os.path.exists(f"{{folder}}/told0"):
        time.sleep(0.02)
    for value in (2.0, 100.0, 1000.0):
        told(lambda: once(value))
    open(f"{{folder}}/over{{rank}}", "w")
    while not os.path.exists(f"{{folder}}/over{{1 - rank}}"):
        time.sleep(0.02)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("width", [3, 300])
def test_after_a_wait_that_was_given_up_nobody_gets_a_wrong_sum(tmp_path: Path, width: int) -> None:
    """Rank 0 goes on after its error; rank 1 comes then. Summed in place or not."""
    found = ranks(tmp_path, GIVEN_UP.format(width=width), patience=1.4, end=False)
    first, second = (re.sub(r" after [\d.]+ s", "", words) for _, words, _ in found)
    over = "pass 2 was not done within 1 s, and rank 1 had not arrived."
    mean, told, *later = first.split("\n", 2)
    assert (mean, told) == (
        "mean 1.0",
        "CommunicationError: rank 0, pass 2: bucket 0 (weight) could not be reduced over shared_memory: not done "
        "within 1 s",
    )
    where = "rank {0}, pass {1}: bucket 0 (weight) could not be reduced over shared_memory: "
    again = [f"CommunicationError: {where.format(0, n)}{over}\nStart again, on all ranks.\n" for n in (3, 4)]
    assert later[0].endswith("logs.\n" + "".join(again)), later
    quoted = f"rank 0 cannot go on: {over}\nRemove the cause and start again, on all ranks.\n"
    peer = [f"PeerError: {where.format(1, n)}{quoted}" for n in (2, 3, 4)]
    assert second == "mean 1.0\n" + "".join(["mean 2.0\n", *peer[1:]] if width == 3 else peer)


def test_a_rank_that_was_killed_between_number_and_note_silences_nobody() -> None:
    store = torch.distributed.HashStore()
    reader, writer = Channel(store, 0, 3), Channel(store, 2, 3)
    below = torch.distributed.PrefixStore("stretto", store)
    reader.read()
    assert reader.notes == []
    assert below.add("notes", 1) == 1  # and then it was killed
    writer.post(Note(2, "forward"))
    writer.post(Note(2, "backward"))
    reader.read()
    assert [note.phase for note in reader.notes] == ["forward", "backward"]
    reader.read()
    below.set("note/1", json.dumps({"rank": 1, "phase": "ended"}))  # it was only slow
    writer.post(Note(2, "detached"))
    reader.read()
    reader.read()
    assert [note.phase for note in reader.notes] == ["forward", "backward", "ended", "detached"]


@pytest.mark.parametrize("how", list(WAYS_TO_LEAVE))
@pytest.mark.parametrize(("occasion", "passes"), [("attach", 0), ("pass", 4)])
def test_a_rank_that_has_left_in_peace_is_named_before_one_that_could_not_go_on_without_it(
    how: str, occasion: str, passes: int
) -> None:
    """Which of the two a third rank reads first is chance."""
    gone = Note(1, how, "actor" if passes else "", passes=3 if passes else None, leaves=True)
    explained = str(left_early("rank 2, here", occasion, [gone], passes))
    quoting = Note(2, "waiting", gone.handle, passes=gone.passes, error=f"PeerError: {explained}", leaves=True)
    unlike = Note(2, "waiting", gone.handle, error="CommunicationError: rank 2, here: rank 3 stays.", leaves=True)
    for notes in ([gone, quoting], [quoting, gone], [unlike, quoting, gone]):
        assert str(left_early("rank 2, here", occasion, notes, passes)) == explained
    assert str(unlike) in str(left_early("rank 2, here", occasion, [gone, unlike], passes))
    own = Note(0, "forward", gone.handle, error="ValueError: no.", leaves=True)
    assert str(own) in str(left_early("rank 2, here", occasion, [gone, quoting, own], passes))
    caught = Note(2, "waiting", gone.handle, error="PeerError: rank 2: rank 1 cannot go on: no memory.", leaves=True)
    assert str(caught) in str(left_early("rank 2, here", occasion, [gone, caught], passes)), "it left in peace later"


def test_a_rank_that_left_amid_a_pass_has_had_as_many_batches() -> None:
    """It has caught what failed there, a timeout say, and ended by sys.exit(1), of which Python is silent."""
    gone = Note(0, "ended", "actor", passes=6, leaves=True)
    assert str(left_early("rank 1, pass 6", "pass", [gone], 6)) == (
        "rank 1, pass 6: rank 0 has left (its process has ended), so nobody can complete this pass, which it had "
        "begun.\nLook at the first error in its log: it may have failed here, and caught that."
    )
    assert "rank 0 finished after 6 passes" in str(left_early("rank 1, pass 7", "pass", [gone], 7))


def opened(transport: Any) -> Peers:
    """Of a rank that the others know."""
    peers = Peers(transport)
    peers.open()
    return peers


class Silent(LocalTransport):
    """Of rank 0 of two. It carries nothing."""

    rank, world_size, patience = 0, 2, 10.0

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("ended", [False, True])
def test_who_could_not_go_on_does_not_blame_a_rank_that_quotes_it(ended: bool) -> None:
    """The other failed for want of this rank, which alone knows the cause; its process may have ended by that."""
    text = (
        "rank 0: the exchange with rank 2 of another host has failed: no route\n"
        "Look at the first error in the other ranks' logs, and start again, on all ranks."
    )

    class Broken(Silent):
        name, store = "broken", dist.HashStore()

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: object = None) -> None:
            raise stretto.CommunicationError(text)

        def dead(self) -> list[tuple[int, int]]:
            return [(1, 77)] if ended else []

    quoting = "rank 1: rank 0 cannot go on: the exchange with rank 2 of another host has failed: no route."
    Channel(Broken.store, 1, 2).post(Note(1, "backward", error=f"PeerError: {quoting}", leaves=True))
    with pytest.raises(stretto.CommunicationError) as caught:
        opened(Broken()).wait(Broken())
    assert str(caught.value) == text
    with pytest.raises(stretto.CommunicationError) as caught:
        opened(Broken()).wait_for(Broken(), "bucket 0 (weight)")
    assert str(caught.value) == text.replace("0:", "0, attach: bucket 0 (weight) could not be reduced over broken:", 1)
    Broken.store = dist.HashStore()
    missed = "PeerError: rank 1, pass 4: rank 0 finished after 3 passes (it was detached), so nobody can complete this."
    Channel(Broken.store, 1, 2).post(Note(1, "backward", error=missed, leaves=True))
    with pytest.raises(stretto.PeerError, match=re.escape(missed)):  # this rank waits for another model now
        opened(Broken()).wait_for(Broken(), "bucket 0 (weight)")


def test_what_the_transport_knows_is_more_than_that_a_rank_has_left_in_peace_since() -> None:
    """Its program has caught the error, and ended with code 0."""

    class Told(Silent):
        name, store = "told", dist.HashStore()
        text = "rank 0: rank 1 cannot go on: No space left on device.\nStart again, on all ranks."

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: object = None) -> None:
            raise stretto.PeerError(self.text)

        def dead(self) -> list[tuple[int, int]]:
            return []

    Channel(Told.store, 1, 2).post(Note(1, "ended", leaves=True))
    with pytest.raises(stretto.PeerError) as caught:
        opened(Told()).wait(Told())
    assert str(caught.value) == Told.text
    Told.text = "rank 0: rank 1 (pid 77) has closed its end."
    with pytest.raises(stretto.PeerError, match="rank 1 has left \\(its process has ended\\), so nobody can complete"):
        opened(Told()).wait(Told())


def test_a_rank_that_is_another_process_by_now_is_heard() -> None:
    """Without a handle for a while, it has attached anew, and left for want of a third, before it had a name there."""
    store = dist.HashStore()
    reader, before = Channel(store, 0, 2), Channel(store, 1, 2)
    first = Seat(handle="actor")
    before.open(first)
    assert reader.person(1) is not None
    before.close(first, "detached")
    after = Channel(store, 1, 2)
    after.open(Seat())
    after.post(Note(1, "waiting", error="PeerError: rank 2 died", leaves=True))
    reader.read()
    assert reader.told(Seat()) == []
    reader.look_again()
    assert [note.error for note in reader.told(Seat())] == ["PeerError: rank 2 died"]


def test_notes_of_a_handle_ask_nobody_who_the_ranks_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank that ever detached one would be asked for in every look of all that wait."""
    store = dist.HashStore()
    channel = Channel(store, 0, 2)
    channel.post(Note(1, "detached", handle="actor", leaves=True))
    channel.read()
    monkeypatch.setattr(Channel, "person", lambda *_, **__: pytest.fail("asked"))
    channel.look_again()


def test_what_failed_in_attach_is_told_to_those_that_make_the_same_attempt_or_are_behind() -> None:
    store = dist.HashStore()
    mine, other = Channel(store, 0, 2), Channel(store, 1, 2)

    def attempt(channel: Channel) -> Seat:
        channel.open(seat := Seat())
        assert channel.count_attempt(seat) == channel.count_attempt(seat)
        return seat

    def fail(seat: Seat, text: str) -> None:
        other.post(Note(1, "attach", attempt=seat.attempt, error=text, leaves=True))
        other.close(seat, "detached")

    def heard(seat: Seat) -> list[str]:
        mine.read()
        return [note.error for note in mine.told(seat)]

    fail(attempt(other), "first")
    assert heard(Seat()) == [], "it does not attach"
    assert heard(one := attempt(mine)) == ["first"]
    fail(attempt(other), "second")
    assert heard(one) == ["first", "second"], "it is behind"
    two = attempt(mine)
    assert heard(two) == ["second"]
    two.handle = "named"
    assert heard(two) == ["second"], "a rank that has not heard the name yet may be the one that fails"
    two.attached = True
    assert heard(two) == []
    assert heard(attempt(mine)) == []
    other.open(Seat())
    again = Channel(store, 1, 2)
    again.open(Seat())  # as another process, or after its last handle has gone
    mine.look_again()
    assert heard(one) == []


def test_a_rank_that_has_come_again_is_not_said_to_have_failed() -> None:
    store = dist.HashStore()
    mine, other = Channel(store, 0, 2), Channel(store, 1, 2)

    def silent(*notes: Note) -> str:
        for note in notes:
            other.post(note)
        mine.read()
        return mine.why_silent(1)

    assert silent() == "has not come here so far"
    assert silent(Note(1, "attach", attempt=1, leaves=True)) == (
        "has not come back since it failed (its own log has the error)"
    )
    assert silent(Note(1, "attach", attempt=2, error="ValueError: no.\nDo this.", leaves=True)) == (
        "has not come back since it failed (ValueError: no)"
    )
    failed = "has not come back since it failed (ValueError: no)"
    assert silent(Note(1, "detached", handle="critic", attempt=1, leaves=True)) == failed, "it was attached before"
    assert silent(Note(1, "detached", handle="actor", attempt=3, leaves=True)) == "has not come here so far"


@pytest.mark.parametrize("exit_code, phase", [(0, "dropped"), (None, "dropped"), (1, "before it ended")])
@pytest.mark.parametrize("told, number", [(None, 3), (("", 1, "ValueError: old"), 3), (("", 2, "ValueError: no"), 2)])
def test_a_model_that_goes_with_what_ends_a_child_has_not_done_its_passes(
    exit_code: int | None, phase: str, told: tuple[str, int, str] | None, number: int
) -> None:
    """As from Python 3.13 on: what has ended a child of multiprocessing is gone by then, and its exit code is there."""
    store = dist.HashStore()
    mine, other = Channel(store, 0, 2), Channel(store, 1, 2)
    seat = Seat(handle="actor", passes=2, told=told and ("actor", *told[1:]))
    other._child = SimpleNamespace(f_locals={} if exit_code is None else {"exitcode": exit_code})
    other.open(seat)
    other.close(seat, "dropped")
    mine.read()
    (note,) = (one.about("actor") for one in mine.notes)
    assert (note.phase, note.failed, note.passes) == (phase, bool(exit_code), 2)
    if exit_code:
        assert (note.number, note.error) == (number, "ValueError: no" if number == 2 else "")


@pytest.mark.parametrize("words", [True, False])
def test_a_store_whose_rank_has_told_its_last_words_is_left_alone(words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes soon: torch would print a stack for a look in just that moment. Until then, last words can be told."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    below, looks = dist.PrefixStore("stretto", store), []
    here, host, before = Channel(store, 1, 2), Channel(store, 0, 2), Channel(store, 0, 2)
    before.me = dataclasses.replace(before.me, name="another process, that was rank 0")
    below.set("who/0", json.dumps(dataclasses.asdict(host.me)))
    host.post(Note(0, "detached", "one of its handles", leaves=True))
    host.post(Note(0, "forward"))
    (host if words else before).post(Note(0, "ended", leaves=True))
    here.watch(below, lambda: looks.append("again") or len(looks) > 2)
    assert looks == ["again"] * (1 if words else 3)
    here.post(Note(1, "ended"))
    assert [note.phase for note in (host.read(), host.notes)[1]][2:] == ["ended"] * 2
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + LINGER_SECONDS - POLL_SECONDS + 0.1)
    assert here.store_is_gone() is words
    assert not host.store_is_gone(), "its own, in which it waits for the last words of others"


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_attempts_are_counted_alike_by_a_rank_that_was_without_a_handle(tmp_path: Path, kind: str) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2) if kind == "file" else dist.HashStore()
    channel = Channel(store, 0, 2)
    for expected, others in ((1, 1), (2, 5), (6, 6)):
        assert channel.count_attempt(Seat()) == channel.attempts == expected
        channel.catch_up(0, others)
        channel.catch_up(0, 1)
    assert Channel(store, 0, 2).count_attempt(Seat()) == 7


@pytest.mark.parametrize("step", ["store_is_gone", "attempts_of", "_set"])
def test_an_attempt_that_is_interrupted_while_it_is_counted_is_counted_once(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    assert Channel(store, 0, 2).count_attempt(Seat()) == 1
    channel, seat = Channel(store, 0, 2), Seat()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(channel, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.count_attempt(seat)
    assert channel.count_attempt(seat) == channel.count_attempt(seat) == seat.attempt == 2, "as it is told"
    assert channel.count_attempt(Seat()) == 3
    assert Channel(store, 0, 2).count_attempt(Seat()) == 4


def test_a_model_that_gets_its_name_is_never_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank may be asked for its count just then."""
    counts: list[int] = []
    catch_up = Channel.catch_up

    def look(channel: Channel, begun: int, attempts: int) -> None:
        catch_up(channel, begun, attempts)
        counts.append(channel.counted())

    monkeypatch.setattr(Channel, "catch_up", look)
    run_ranks(lambda transport: stretto.attach(torch.nn.Linear(2, 1), transport=transport), 2)
    assert counts == [1, 1]


def test_a_word_that_is_given_up_leaves_the_process_group_as_it_is() -> None:
    """In attach that is so whenever a rank comes late, and what is abandoned in a group keeps it for ever."""
    abandoned: list[object] = []

    class Carrier(Silent):
        name, store = "carrier", dist.HashStore()

        def abandon(self, work: object, handle: str, told: str) -> None:
            abandoned.append(work)

    peers, word = Peers(Carrier()), AwaitedKeys(Carrier.store, "late")
    with pytest.raises(RuntimeError, match="not done within 0 s"):
        peers.wait(word, 0.1)
    assert not abandoned


def test_who_waits_for_what_others_have_stepped_says_what_they_were_to_call() -> None:
    class Carrier(Silent):
        name, patience = "carrier", 0.1

    class Lost:
        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: object = None) -> None:
            raise RuntimeError("the network is down")

    with pytest.raises(stretto.CommunicationError) as caught:
        Peers(Carrier()).wait_for(Lost(), "what other ranks have stepped")
    assert str(caught.value) == (
        "rank 0, attach: what other ranks have stepped could not be reduced over carrier: the network is down\n"
        "Expected every rank to call optimizer.step(). Look at the first error in the other ranks' logs."
    )


def test_what_a_transport_raises_is_told_with_the_pass_and_keeps_its_cause() -> None:
    class Broken(Silent):
        name, store = "broken", dist.HashStore()

    class OddError(stretto.CommunicationError):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"rank 0: {one} is not {two}")
            self.two = two

    def told(hidden: bool) -> OddError:
        with pytest.raises(OddError) as caught:
            try:
                try:
                    raise KeyError("root")
                except KeyError:
                    odd = OddError(1, 2)
                    odd.__suppress_context__ = hidden
                    raise odd  # noqa: B904
            except OddError as error:
                Peers(Broken()).fail("it", error)  # type: ignore[arg-type]
        return caught.value

    error = told(hidden=False)
    assert (str(error), error.two) == ("rank 0, attach: it over broken: 1 is not 2", 2)
    assert isinstance(error.__cause__, KeyError)
    hidden = told(hidden=True)
    assert hidden.__cause__ is None and hidden.__suppress_context__


def test_a_thread_rank_that_does_not_come_is_named_with_its_place() -> None:
    def elsewhere() -> None:
        time.sleep(3)

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        stretto.attach(model, transport=transport)
        if transport.rank == 1:
            return elsewhere()
        with pytest.raises(stretto.CommunicationError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        assert str(caught.value.__cause__) == "not done within 2 s"
        return plain(str(caught.value))

    assert run_ranks(worker, 2, timeout=2)[0] == (
        "rank 0, pass 1: bucket 0 (bias, weight) could not be reduced over local (threads of one process): not done "
        "within 2 s\n"
        "rank 0 waits at test_peers.py:LINE in worker; rank 1 is at test_peers.py:LINE in elsewhere.\n"
        "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
    )


def test_after_a_wait_that_was_given_up_no_thread_rank_gets_a_wrong_sum() -> None:
    gave_up, kept = threading.Event(), []

    def worker(transport):
        kept.append(model := torch.nn.Linear(2, 1, bias=False))  # one that is dropped is told of instead
        stretto.attach(model, transport=transport)
        if transport.rank == 1:
            assert gave_up.wait(30)
        told = []
        for value in (1.0, 100.0):
            model.zero_grad()
            with pytest.raises(stretto.CommunicationError) as caught:
                (model.weight.sum() * value).backward()
            told.append(str(caught.value).splitlines()[0])
            gave_up.set()
        return told

    why = "bucket 0 (weight) could not be reduced over local (threads of one process):"
    over = "rank 0: pass 1 was not done within 2 s"
    assert run_ranks(worker, 2, timeout=2) == [
        [f"rank 0, pass 1: {why} not done within 2 s", f"rank 0, pass 2: {why} {over}"],
        [f"rank 1, pass 1: {why} {over}", f"rank 1, pass 2: {why} {over}"],
    ]


def test_a_rank_that_waits_in_a_collective_of_torch_says_in_which() -> None:
    """As at the end of an epoch that has fewer batches there."""
    found = []

    class Pickled:
        def __reduce__(self) -> Any:
            found.append(standing(sys._getframe(1)))
            return int, ()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        line = sys._getframe().f_lineno + 1
        dist.all_gather_object([None], Pickled())
    finally:
        dist.destroy_process_group()
    name = "test_a_rank_that_waits_in_a_collective_of_torch_says_in_which"
    assert found == [f"in torch.distributed.all_gather_object() at test_peers.py:{line} in {name}"]


def stack(*files: str) -> Any:
    frame = None
    for file in files:
        code = SimpleNamespace(co_filename=file, co_name="here")
        frame = SimpleNamespace(f_code=code, f_back=frame, f_lineno=1)
    return frame


@pytest.mark.parametrize(
    ("own", "other", "works"),
    [
        ([__file__, stretto.line.__file__], [__file__, threading.__file__], True),
        ([__file__, stretto.line.__file__], [__file__, torch.autograd.graph.__file__], True),  # trains as well
        ([stretto.line.__file__], [__file__, torch.autograd.graph.__file__], False),  # has called backward on a device
        ([stretto.line.__file__], [__file__, threading.__file__], True),
        ([__file__], ["/usr/lib/python3/dist-packages/tqdm/_monitor.py", threading.__file__], False),
    ],
)
def test_which_threads_may_call_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, own: list[str], other: list[str], works: bool
) -> None:
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): stack(*own), 1: stack(*other)})
    assert others_work() is works


def test_a_rank_whose_program_is_over_is_at_its_end() -> None:
    """Where the interpreter calls what was left to be done at exit there is no line of the user's any more."""
    library, user = stretto.line.__file__, __file__
    assert standing(stack(library, library)) == "at the end of its program"
    assert standing(stack(user, library, library)) == "in here() at test_peers.py:1 in here"
    assert standing(stack("<string>", library)) == "at line.py:1 in here"


def test_packages_that_are_installed_within_pythons_own_folder_are_none_of_its_own() -> None:
    """As outside a virtual environment."""
    own = Path(sysconfig.get_paths()["stdlib"])
    assert not is_users(str(own / "threading.py"))
    assert is_users(str(own / "site-packages" / "trainer" / "loop.py"))


def test_a_rank_inside_an_installed_package_is_at_the_users_own_line_too() -> None:
    """A progress bar's line, ``for batch in tqdm(loader)``, is the same wherever in the program the loop is."""
    bar, library, user = "/lib/python3/site-packages/tqdm/std.py", stretto.line.__file__, "/home/me/train.py"
    assert standing(stack(user, bar, threading.__file__)) == "at std.py:1 in here (from train.py:1 in here)"
    assert standing(stack(bar, user, bar, library)) == "in here() at std.py:1 in here (from train.py:1 in here)"
    assert standing(stack(bar, user, library)) == "in here() at train.py:1 in here"
    assert standing(stack(threading.__file__, bar)) == "at std.py:1 in here"  # python -m package


def attach_in(name: str, model: torch.nn.Module) -> stretto.Synchronizer:
    """As a line of a program in a file of that name does."""
    found: dict[str, Any] = {"stretto": stretto, "model": model}
    exec(compile("sync = stretto.attach(model)", name, "exec"), found)
    return found["sync"]


def in_an_undecodable_file(rank: int) -> str:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(rank)
    sync = attach_in("/train\udcc3\udcb6\udcff.py", model)
    model(torch.ones(1, 2)).sum().backward()
    return f"{model.weight.tolist()} {model.weight.grad.tolist()} {sync.statistics.passes}"


def test_a_program_whose_file_name_python_cannot_decode() -> None:
    """As any name beyond ASCII under LC_ALL=C with PYTHONUTF8=0: the store refuses the surrogates that stand for it."""
    assert spawn_ranks(in_an_undecodable_file, 2) == ["[[0.0, 0.0]] [[1.0, 1.0]] 1"] * 2
    assert standing(stack("/train\udcc3\udcb6\udcff.py")) == "at trainö\ufffd.py:1 in here"


class HasNoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_that_cannot_be_shown_is_told_all_the_same() -> None:
    """Telling it raised in its place, and the others heard only that this rank had ended."""
    assert text_of(HasNoText()) == "HasNoText: <exception str() failed>"
    assert text_of(ValueError()) == "ValueError"


@pytest.mark.parametrize(("code", "told"), [(0, ""), (None, ""), (1, "ValueError: no more data")])
def test_who_exits_well_after_an_exception_has_not_failed(code: int | None, told: str, monkeypatch) -> None:
    """As in ``except ValueError: sys.exit(0)`` of a child, whose finalizers run meanwhile."""
    try:
        try:
            raise ValueError("no more data")
        except ValueError:
            sys.exit(code)
    except SystemExit:
        assert text_of(what_ends_this_process()) == told
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        assert what_ends_this_process() is None  # at a prompt an exception ends nothing


def test_what_was_told_of_a_pass_and_ends_the_process_is_of_that_pass() -> None:
    """Of another model it is before the next one."""
    try:
        raise ValueError("no more data")
    except ValueError:
        told = {("one", 2, "ValueError: no more data"), ("other", 3, "ValueError: bad token")}
        assert last_words(1, {"one": 2, "other": 3}, told, failed=False).counts == {"one": [2, 2], "other": [3, 4]}


def test_of_failures_of_several_models_that_end_a_process_one_that_says_why_is_quoted() -> None:
    told = [("one", 2, ""), ("other", 3, "ValueError: no"), ("third", 1, "")]
    note = last_words(1, {"one": 2, "other": 3, "third": 1}, told, failed=True)
    assert (note.error, {*map(tuple, note.counts.values())}) == ("ValueError: no", {(2, 2), (3, 3), (1, 1)})


class Plain:
    """A work of a user's own transport, which knows ``wait()`` alone."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def wait(self) -> None:
        self.inner.wait()


class PlainButAsked(Plain):
    def is_completed(self) -> bool:
        return self.inner.is_completed()


class AnnotatedForTypeCheckers:
    """``wait`` of a work whose annotations cannot be looked up, which Python 3.14 tries when it is asked."""

    def __get__(self, work: PlainButAsked, kind: type) -> Any:
        return self if work is None else work.inner.wait

    @property
    def __signature__(self) -> Any:
        raise NameError("name 'timedelta' is not defined")

    def __call__(self, *_: object) -> None:
        raise AssertionError("a work waits, its class does not")


class Annotated(PlainButAsked):
    wait = AnnotatedForTypeCheckers()


@pytest.mark.parametrize("kind", [Plain, PlainButAsked, Annotated])
def test_works_that_take_no_timeout_are_waited_for_plainly(kind: type) -> None:
    class Own(RecordingTransport):
        def all_reduce(self, tensor):
            return kind(super().all_reduce(tensor))

        def broadcast(self, tensor, root=0):
            return kind(super().broadcast(tensor, root))

    def worker(transport):
        model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
        assert Own(transport).patience is not None
        stretto.attach(model, transport=Own(transport), bucket_cap_mb=1e-6)
        for _ in range(3):
            model.zero_grad()
            model[0](torch.full((1, 2), 1.0 + 2 * transport.rank)).sum().backward()
        return model[0].weight.grad

    for found in run_ranks(worker, 2, timeout=20):
        assert torch.equal(found, torch.full((1, 2), 2.0))


class Telling(torch.autograd.Function):
    """Fails in backward, and asks for that failure to be told while it is still to come."""

    @staticmethod
    def forward(ctx, x, tell):
        ctx.tell = tell
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        assert when_raised(ctx.tell)
        raise ValueError("seen")


@pytest.mark.parametrize("traced", [False, True])
def test_an_exception_on_its_way_is_seen_and_a_debugger_keeps_its_trace(traced: bool) -> None:
    events: list[str] = []
    seen: list[tuple[str, str]] = []

    def debugger(frame, event, argument):
        events.append(f"{frame.f_code.co_name} {event}")
        return debugger

    def tell(error, trace):
        seen.append((str(error), trace.tb_frame.f_code.co_name))

    def backward() -> None:
        Telling.apply(torch.ones(1, requires_grad=True), tell).sum().backward()

    before = sys.gettrace()
    mine = debugger if traced else before
    try:
        sys.settrace(mine)
        with pytest.raises(ValueError, match="seen"):
            backward()
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is mine
    assert seen == [("seen", "_engine_run_backward")]
    assert not traced or {"_engine_run_backward exception", "backward exception", "backward return"} <= set(events)


def test_an_exception_of_another_thread_cannot_be_seen() -> None:
    assert not when_raised(lambda *_: None)
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


def test_an_exception_at_the_prompt_of_a_debugger_cannot_be_seen() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True) * 1
    x.register_hook(lambda _: seen.append(when_raised(lambda *_: None)))

    def prompt(*_: object) -> None:  # nothing is traced while it runs
        if not seen:
            x.sum().backward()

    before = sys.gettrace()
    try:
        sys.settrace(prompt)
        (lambda: None)()
    finally:
        sys.settrace(before)
    assert seen == [False]


def test_who_waits_for_an_exception_of_an_engine_that_ends_well_is_told_so() -> None:
    """The pass of one model may be dropped in the backward of another, where the last of its graph goes."""
    told: list[object] = []
    before = sys.gettrace()
    x = torch.ones(1, requires_grad=True) * 1
    x.register_hook(lambda _: when_raised(lambda *of: told.append(of)) and None)
    x.sum().backward()
    assert told == [(None, None)] and sys.gettrace() is before


def test_two_that_wait_for_one_exception_are_both_told() -> None:
    seen: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            for name in "ab":
                assert when_raised(lambda error, trace, name=name: seen.append(f"{name}: {error}"))
            raise ValueError("once")

    before = sys.gettrace()
    with pytest.raises(ValueError, match="once"):
        Twice.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["a: once", "b: once"] and sys.gettrace() is before


def test_a_process_lives_whatever_bytes_its_name_has() -> None:
    name = Path("/proc/self/comm")
    before, started = name.read_bytes(), started_at(os.getpid())
    name.write_bytes(b"caf\xc3")  # cut amid a letter, as a title of 16 bytes may be
    try:
        assert started and started_at(os.getpid()) == started
        assert not is_over(os.getpid(), started)
        assert not is_over(os.getpid(), ""), "its start could not be read then"
    finally:
        name.write_bytes(before)


def test_a_rank_under_qemu_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """qemu answers for ``/proc/PID/stat`` of the process that asks, with a start time that nobody else reads."""
    real, mine = Path.read_bytes, f"/proc/{os.getpid()}/stat"

    def read(path: Path) -> bytes:
        before, name, behind = real(path).rpartition(b")")
        fields = behind.split()
        if str(path) in (mine, "/proc/self/stat"):
            fields[19] = b"7"
        return before + name + b" " + b" ".join(fields)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read)
        told = started_at(os.getpid())
    assert told and not is_over(os.getpid(), told), "as its peers see it"


def test_a_process_of_which_nothing_can_be_read_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user where /proc hides it, or for want of descriptors."""

    def hidden(path: Path) -> bytes:
        raise FileNotFoundError(path)

    with subprocess.Popen(["sleep", "100"]) as process:
        started = started_at(process.pid)
        with monkeypatch.context() as limited:
            limited.setattr(Path, "read_bytes", hidden)
            assert started_at(process.pid) == "" and not is_over(process.pid, started)
        process.kill()
        process.wait()
    assert is_over(process.pid, started)


def test_a_rank_that_waits_long_asks_again_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line after 7 s, and then silence until the limit of the group, is as good as a hang."""

    class Silent:
        asked = 0

        def ask(self, handle: str) -> dict[int, str]:
            self.asked += 1
            return {1: "key"}

        def heard(self, keys: dict[int, str]) -> dict[int, Answer]:
            return {}

    monkeypatch.setattr(stretto.inquiry, "who_has_gone_apart", lambda *_: None)
    monkeypatch.setattr(stretto.inquiry, "places", lambda *how: f"{how[-1]:.0f}")
    inquiry, channel = Inquiry(Seat()), Silent()
    for second in range(1200):
        inquiry.go_on("here", channel, [], float(second))  # type: ignore[arg-type]
    told = [record.getMessage() for record in caplog.records]
    assert channel.asked == 4 and told == [f"here: {second}." for second in (10, 35, 185, 1085)]


@pytest.mark.parametrize(("group", "other", "sure"), [(2, 2, True), (2, 1, False), (3, 2, False)])
def test_a_broadcast_is_waited_for_in_vain_only_if_all_who_may_hand_it_on_wait(
    group: int, other: int, sure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come by way of a rank that is late, or of which nothing is known, when its source has long gone on."""

    def answer(rank: int) -> Answer:
        return Answer("", [1, 0], {"model": [1, 0]}, {}, range(group + 1) if rank <= other else (), 0)

    class Answering:
        rank = 0

        def ask(self, handle: str) -> dict[int, str]:
            return {1: "key", 2: "key"}

        def heard(self, keys: dict[int, str]) -> dict[int, Answer]:
            return {rank: answer(rank) for rank in keys}

        def beside(self) -> dict[str, list[int]]:
            return {"model": [2, 0]}

    monkeypatch.setattr(stretto.inquiry, "who_has_gone_apart", lambda *_: None)
    monkeypatch.setattr(stretto.inquiry, "places", lambda *_: "here and there")
    monkeypatch.setattr(stretto.inquiry, "others_work", lambda: False)
    process = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 0)
    monkeypatch.setattr(stretto.inquiry, "dist", process)
    inquiry = Inquiry(Seat(passes=2))
    with pytest.raises(stretto.PeerError, match="rank 1 waits") if sure else contextlib.nullcontext():
        for second in range(100):
            inquiry.go_on("rank 0", Answering(), [], float(second))  # type: ignore[arg-type]


def test_who_waits_for_one_that_has_not_come_is_told_where_to_look(caplog: pytest.LogCaptureFixture) -> None:
    inquiry, channel = Inquiry(Seat()), Channel(dist.HashStore(), 0, 2)
    for second in range(10):
        inquiry.go_on("rank 0, attach", channel, [], float(second))
    (told,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"rank 0, attach: rank 0 has waited \d s .*; rank 1 has not come here so far\.\n"
        + re.escape(
            "All ranks make this call: look for a condition around it (if rank == 0), for a call of torch.distributed "
            "before it in which another rank waits, or for a rank that was not started."
        ),
        told,
    )


def test_who_waits_for_one_that_waits_in_a_call_of_torchs_is_told_where_to_look(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = (
        "rank 0 has waited 5 s in state_dict() at a.py:3 in f; rank 1 is in torch.distributed.barrier() at a.py:9 in f"
    )
    monkeypatch.setattr(stretto.inquiry, "places", lambda *_: now)
    inquiry, channel = Inquiry(Seat()), Channel(dist.HashStore(), 0, 2)
    for second in range(10):
        inquiry.go_on("rank 0, pass 2", channel, [], float(second))
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0, pass 2: {now}.\n"
        "All ranks make this call: look for a loop that another rank has left (fewer batches, or a break of its own), "
        "for a condition around the call (if rank == 0), or for a call of torch.distributed in which it waits first."
    ]


def test_who_waits_within_a_wait_is_amid_that_still() -> None:
    """A handler of signals that reads what is under way waits for it; the call behind that was let through."""

    def worker(transport: Any) -> bool:
        peers = Peers(transport)
        this_thread.waits = True
        peers.wait(transport.all_reduce(torch.ones(1)))
        still, this_thread.waits = this_thread.waits, False
        peers.wait(transport.all_reduce(torch.ones(1)))
        return still and not this_thread.waits

    assert shared(worker, 2) == [True, True]


def seated(*seats: Seat, rank: int = 0, store: dist.Store | None = None) -> Channel:
    channel = Channel(store or dist.HashStore(), rank, 2)
    for seat in seats:
        channel.open(seat)
    return channel


@pytest.mark.parametrize("threads", [1, 2])
def test_handles_of_several_threads_have_no_common_order(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemon threads too, of which a program has more than one knows of."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    channel = seated(Seat("a", passes=3, thread=1), Seat("b", passes=2, thread=threads), Seat("c"))
    assert channel.beside() == ({"": [0], "a": [3, 0], "b": [2, 0], "c": [0, 0]} if threads == 1 else {})


def test_what_ranks_write_of_their_calls_does_not_pile_up() -> None:
    store, found = dist.HashStore(), []
    seats = [Seat("a"), Seat("a")]
    channels = [seated(seat, rank=rank, store=store) for rank, seat in enumerate(seats)]
    for _ in range(20):
        for seat in seats:
            seat.calls += 1
        words = [one.come(seat, sys._getframe(), bool) for one, seat in zip(channels, seats, strict=True)]
        for word in words:
            word.wait()
            assert len({*word.said()}) == 1
        for one, seat in zip(channels, seats, strict=True):
            one.came(seat)
        found.append(store.num_keys())
    assert found[0] == found[-1] == max(found)


@pytest.mark.parametrize("kind", ["failed", "refused", "detached"])
def test_what_ranks_tell_does_not_pile_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program catches failures for weeks. One that attached anew read all of it."""
    monkeypatch.setattr("stretto.channel.NOTES_KEPT", 8)
    store, found, begun = dist.HashStore(), [], Seat("a")
    writer, reader = seated(begun, store=store), seated(Seat("a"), rank=1, store=store)
    for number in range(1, 101):
        begun.passes = begun.refused = number
        told = begun.note(0, "backward", "ValueError: no", "", before=False)
        if kind == "refused":
            told = dataclasses.replace(told, leaves=True, refused=number)
        if kind == "detached":  # a model that was attached beside this one, by a handle that is gone
            told = Note(0, kind, f"of {number}", leaves=True)
        writer.post(told)
        reader.read()
        found.append((store.num_keys(), len(reader.notes)))
    keys, notes = zip(*found, strict=True)
    assert 32 < max(keys) < 40, "what a rank may be about to read, 8 for each, is there, and as much again"
    assert max(notes) < 20
    late, asked = seated(Seat(), rank=1, store=store), []
    late.line.store = Counted(store, asked)
    late.read()
    assert len(late.notes) == (16 if kind == "detached" else 4) and late.notes[-1].passes == told.passes
    assert len(asked) <= 2 + 2 * 16, "two for each note that may be there"


class Counted(dist.PrefixStore):
    """Knows how often it was asked."""

    def __init__(self, store: dist.Store, asked: list[str]) -> None:
        super().__init__("stretto", store)
        self.asked = asked

    def check(self, keys: list[str]) -> bool:
        self.asked += keys
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return super().get(key)


def test_why_a_rank_has_left_is_kept_among_what_it_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.channel.NOTES_KEPT", 8)
    writer = seated(seat := Seat("a"), store=(store := dist.HashStore()))
    reader = seated(Seat("a"), Seat("b"), rank=1, store=store)
    for place, error in enumerate(["ValueError: why", *["PeerError: of that"] * 30]):
        writer.post(dataclasses.replace(seat.note(0, "backward", error, "", before=False), leaves=True))
        writer.post(Note(0, "backward", "b", passes=place))
        reader.read()
    assert len(reader.notes) < 20
    assert reader.told(Seat("a"))[0].error == "ValueError: why"
    assert reader.told(Seat("b"))[-1].passes == 30


def test_a_refused_step_is_kept_among_failures_that_were_caught_since() -> None:
    """It ends the others' wait for that step."""
    refused = Note(0, "step", "a", 1, leaves=True, refused=1)
    caught = [Note(0, "forward", "a", number) for number in range(1, 9)]
    assert still_of_use([refused, *caught], {"a"}) == [refused, *caught[-OF_A_KIND:]]


def test_of_attempts_to_attach_that_failed_the_last_are_kept() -> None:
    """A rank heeds a note about the attempt that it makes, or about a later one."""
    failed = [Note(0, "attach", leaves=True, attempt=number) for number in range(1, 9)]
    assert still_of_use(failed, {"a"}) == failed[-OF_A_KIND:]


def test_a_handle_that_is_collected_while_notes_are_sifted_takes_none_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells that it was dropped, and reads what there is."""
    monkeypatch.setattr("stretto.channel.NOTES_KEPT", 8)
    writer = seated(Seat("a"), store=(store := dist.HashStore()))
    reader = seated(Seat("a"), collected := Seat("b"), rank=1, store=store)
    sifted = list[int]()

    def sift(notes: list[Note], handles: set[str] | None) -> list[Note]:
        sifted.append(len(notes))
        if collected in reader._seats:
            reader.close(collected, "dropped")
            reader.read()
        return still_of_use(notes, handles)

    monkeypatch.setattr("stretto.channel.still_of_use", sift)
    for number in range(9):
        writer.post(Note(0, "forward", "a", number))
    reader.read()
    assert sifted == [9], "not once more within it"
    assert [note.phase for note in reader.notes] == ["forward"] * OF_A_KIND + ["dropped"]


def test_attempts_of_others_count_for_a_rank_that_comes_again_with_a_new_channel() -> None:
    """After its last handle was detached: else what it tells of its next attempt would be about one that has been."""
    store = dist.HashStore()
    before, after = (seated(Seat(), store=store) for _ in range(2))
    assert before.count_attempt(Seat()) == 1
    before.catch_up(1, 3)
    assert after.count_attempt(Seat()) == 4


def test_the_rank_with_the_store_stays_until_the_others_have_left_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    mine, before, other = (seated(Seat("a"), rank=rank, store=store) for rank in (0, 1, 1))
    before.me = dataclasses.replace(before.me, name="another process, that was rank 1")
    assert mine.person(1) == other.me
    other.post(Note(1, "detached", "b", leaves=True))
    before.post(Note(1, "ended", leaves=True))
    other.post(Note(1, "forward"))
    assert not mine._all_have_left()
    with monkeypatch.context() as patch:
        patch.setattr(mine, "dead", lambda: [(1, 5)])
        assert mine._all_have_left()
    other.post(Note(1, "ended", leaves=True))
    assert mine._all_have_left()


def test_what_may_be_about_a_handle_that_has_no_name_yet_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.channel.NOTES_KEPT", 8)
    writer, store = seated(Seat("a"), store=(store := dist.HashStore())), store
    reader = seated(Seat(), rank=1, store=store)
    for number in range(30):
        writer.post(Note(0, "detached", f"of {number}", leaves=True))
        reader.read()
    assert len(reader.notes) == 30
    reader._seats[0].handle = "of 3"
    for number in range(30):
        writer.post(Note(0, "detached", f"of {number + 30}", leaves=True))
        reader.read()
    assert [note.handle for note in reader.told(Seat("of 3"))] == ["of 3"] and len(reader.notes) < 40


def two_processes(store: dist.Store) -> tuple[Channel, Channel]:
    """As far as one that waits for an answer can tell."""
    mine, other = (seated(Seat("a"), rank=rank, store=store) for rank in range(2))
    mine.in_one_process = False
    mine._people[1] = dataclasses.replace(other.me, pid=0)
    return mine, other


def test_what_ranks_ask_and_answer_does_not_pile_up() -> None:
    """A rank that evaluates for longer than 5 s is asked in each epoch."""
    store, found = dist.HashStore(), []
    below, (mine, other) = dist.PrefixStore("stretto", store), two_processes(store)
    other.answer(below)
    for _ in range(30):
        keys = mine.ask("a")
        other.answer(below)
        assert mine.heard(keys).keys() == {1}
        found.append(store.num_keys())
    assert found[10] == found[-1] == max(found)


def test_a_rank_that_was_killed_while_it_asked_keeps_nobody_from_an_answer() -> None:
    store = dist.HashStore()
    below, (mine, other) = dist.PrefixStore("stretto", store), two_processes(store)
    other.answer(below)
    assert below.add("ask/1", 1) == 1  # and then it was killed, or the store silent
    keys = mine.ask("a")
    other.answer(below)
    assert mine.heard(keys) == {}, "the other may be about to write its question"
    other.answer(below)
    assert mine.heard(keys).keys() == {1}


def test_what_was_answered_before_the_store_went_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, asked = Channel(dist.HashStore(), 0, 3), []

    def heard(keys: dict[int, str]) -> dict[int, Answer]:
        asked.append([*keys])
        if len(asked) == 3:
            raise RuntimeError("the process group's store has gone")
        return {1: Answer("is here", [], {}, {})} if 1 in keys else {}

    monkeypatch.setattr(channel, "ask", lambda handle: {1: "at/1/1", 2: "at/2/1"})
    monkeypatch.setattr(channel, "heard", heard)
    assert channel.gather("a", 9.0) == {1: Answer("is here", [], {}, {})}
    assert asked == [[1, 2], [2], [2]], "who has answered is not asked for it again"


def test_a_handle_may_join_while_a_note_about_the_process_group_is_read() -> None:
    """The channel's thread reads it; all groups that it is about must know."""
    channel, told = Channel(dist.HashStore(), 0, 2), list[Leftover]()

    class Known(Leftover):
        def is_of(self, *_: Any, **__: Any) -> None:
            told.append(self)
            channel.open(Seat(), [Leftover()])

    for _ in range(2):
        channel.open(Seat(), [Known(used={"a"})])
    channel.post(Note(1, "backward", "a", leftover=["a", "a"]))
    channel.read()
    assert len(told) == 2


class Sent:
    def is_completed(self) -> bool:
        return True


def test_one_thread_may_send_while_another_looks_what_is_under_way() -> None:
    """It failed with "Set changed size during iteration", and what was under way could be freed."""
    in_flight, before = InFlight(), sys.getswitchinterval()
    sent = [in_flight.add(Sent()) for _ in range(2000)]
    begun, ended, found = threading.Event(), threading.Event(), []

    def look() -> None:
        begun.set()
        while not ended.is_set():
            found.append(in_flight.is_under_way())

    thread = threading.Thread(target=look)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        begun.wait()
        sent += [in_flight.add(Sent()) for _ in range(3000)]
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert {*found} == {False}
