"""Whatever a rank waits for, it ends with the others' names and words: attaching, rejoining, hooks, rows, reduce()."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import socket
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import warm_programs
from test_peers import DIED, LEFT, ranks, within

import stretto
from stretto import DistributedDataParallel as DDP
from stretto.blame import SAME_CALLS, is_told
from stretto.notes import Note
from stretto.testing import run_ranks, spawn_ranks
from stretto.waiting import gather_by_sums

pytestmark = pytest.mark.timeout(100)

SHORT = 1.4
"""Patience of ranks that wait in vain. What else they do is done in a tenth of that."""
EVERYWHERE = pytest.mark.parametrize("transport", ["auto", "process_group"])
CONNECTION = re.compile(r"\[\S*?(Connection closed|Timed out|Connection reset)[^\n]*|\S*not done within \d+ s")
NOT_HERE = (
    "rank {0}, {1}: what ranks hold could not be gathered over process_group (gloo): {2}\n"
    "rank {0} waits {3}; {4}.\n"
    "Expected every rank to call {5}. Look at the first error in the other ranks' logs."
)
ENDED = (
    "rank {0}, attach: rank 1 has left (its process has ended), so nobody can complete this attach.\n"
    "Expected every rank to call stretto.attach."
)


def explained(text: str) -> str:
    """Without what the transport said."""
    return re.sub(r"not done within \d s", "{2}", re.sub(r"\(gloo\): [^\n]*", "(gloo): {2}", text))


def ranks_without_a_model(folder: Path, body: str, world: int, **how):
    """As ``ranks``, before anything was attached."""
    return ranks(folder, "sync.detach(); dist.barrier()\n" + textwrap.dedent(body), world, **how)


# Attaching


@pytest.mark.ranks
def test_a_process_group_whose_ranks_are_others_than_those_of_all_is_named(tmp_path: Path) -> None:
    """Rank 1 of it lives: it is rank 2 of all that has failed."""
    body = """
        few = dist.new_group([0, 2])
        if rank != 1:
            sync = stretto.attach(model, process_group=few)
            told(fail=rank == 2)
    """
    (_, mine, _), *_ = ranks_without_a_model(tmp_path, body, 3)
    assert within(mine, "PeerError", 6).startswith(
        "rank 0, pass 1 over process group [0, 2]: backward failed on rank 1, so the mean of this pass lacks "
        "gradients.\n"
        "  rank 1, pass 1, backward: ValueError: bad label (train.py:LINE in backward)\n"
    )


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_not_attach_is_named(tmp_path: Path, world: int) -> None:
    body = """
        def evaluate():
            hang()
        evaluate() if rank == 1 else told(lambda: stretto.attach(Model()))
    """
    found = ranks_without_a_model(tmp_path, body, world, patience=SHORT)
    for rank in {0, 2} & set(range(world)):
        others = {0: "rank 1 has not come here so far", 2: "rank 0 {}; rank 1 has not come here so far"}[rank]
        told = explained(within(found[rank][1], "CommunicationError", 13))
        if world == 2:
            place = "in attach() at train.py:LINE in <lambda>"
            assert told == NOT_HERE.format(0, "attach", "{2}", place, others, "stretto.attach"), found[rank]
        assert "rank 1 has not come here so far" in told and "Expected every rank to call stretto.attach." in told


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_ends_before_the_others_attach_is_quoted(tmp_path: Path, world: int) -> None:
    body = """
        step()
        time.sleep(rank != 1)
        if rank != 1:
            told(lambda: stretto.attach(Model()))
    """
    found = ranks(tmp_path, body, world, end=False)
    for rank in {0, 2} & set(range(world)):
        assert within(found[rank][1], "PeerError", 6) == ENDED.format(rank)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "when"),
    [
        ("", "before pass 1"),
        ("step()\n", "pass 1"),
        ("try: step(fail=True)\nexcept ValueError: pass\n", "pass 1"),
    ],
)
@pytest.mark.parametrize("call", ["check", "report"])
def test_a_call_of_one_rank_alone_is_called_neither_attach_nor_a_pass(
    tmp_path: Path, before: str, when: str, call: str
) -> None:
    found = ranks(tmp_path, f"{before}if rank != 1: told(sync.{call})", 2, end=False)
    assert within(found[0][1], "PeerError", 6) == (
        f"rank 0, {when}: rank 1 has left (its process has ended), so nobody can complete this call, in {call}() at "
        f"train.py:LINE in told.\n{SAME_CALLS}"
    )


@pytest.mark.ranks
def test_a_rank_that_fails_in_attach_for_a_reason_of_its_own_and_lives_on_is_quoted(tmp_path: Path) -> None:
    """Its handle has no name yet, by which ranks know what a note is about."""
    body = """
        class NotBuilt(torch.nn.Linear):
            def named_parameters(self, *how, **more):
                raise ValueError("not built yet")
        told(lambda: stretto.attach((torch.nn.Linear if rank == 0 else NotBuilt)(2, 1)))
        hang()
    """
    (_, mine, _), _ = ranks_without_a_model(tmp_path, body, 2)
    assert within(mine, "PeerError", 6) == (
        "rank 0, attach: rank 1 failed and left, so nobody can complete this attach.\n"
        "  rank 1, attach: ValueError: not built yet (train.py:LINE in named_parameters)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
def test_attaching_again_after_all_ranks_have_failed_for_a_reason_of_their_own(tmp_path: Path) -> None:
    """Not at the same time: what the later one said of its first try is nothing to the other's second."""
    body = """
        sync.detach()
        class NotBuilt(torch.nn.Linear):
            is_built = False
            def named_parameters(self, *how, **more):
                if not self.is_built:
                    raise ValueError("not built yet")
                return super().named_parameters(*how, **more)
        late = NotBuilt(2, 1)
        told(lambda: stretto.attach(late))
        late.is_built = True
        time.sleep(2 * rank)
        sync = stretto.attach(late)
        late(torch.ones(1, 2)).sum().backward()
        print(f"{sync.statistics.passes} pass")
    """
    for _, printed, _ in ranks(tmp_path, body, 2):
        assert "ValueError" in printed and printed.endswith("1 pass\n"), printed


NOT_BUILT = """
    class NotBuilt(torch.nn.Linear):
        def named_parameters(self, *how, **more):
            raise ValueError("not built yet")

    def try_once():
        try:
            stretto.attach(NotBuilt(2, 1))
        except ValueError:
            pass
"""
QUOTED = (
    "rank {0}, attach: rank 1 failed and left, so nobody can complete this attach.\n"
    "  rank 1, {1}\n"
    "Remove the cause and start again, on all ranks."
)


def trying_again(transport: str, *, late: float, then: str) -> str:
    """Rank 1 comes so late, fails in attach, and ``then`` is what both do, rank 0 first."""
    return f"""
        sync.detach()
        if rank == 1:
            time.sleep({late})
            try_once()
            until_told(0)
            time.sleep(0.8)
        else:
            told(lambda: stretto.attach(model, transport={transport!r}))
        {then}
        step()
        right()
    """


def ranks_that_fail_in_attach(folder: Path, body: str, **how):
    return ranks(folder, textwrap.dedent(NOT_BUILT) + textwrap.dedent(body), 2, **how)


@pytest.mark.ranks
@pytest.mark.parametrize("meeting", ["file", "tcp"])
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_a_rank_that_waited_in_attach_for_one_that_failed_there_tries_again(
    tmp_path: Path, meeting: str, transport: str
) -> None:
    """What it had sent would meet something else of the other's second try, and Gloo would end both."""
    body = trying_again(transport, late=1, then=f"sync = stretto.attach(model, transport={transport!r})")
    (code, mine, _), other = ranks_that_fail_in_attach(tmp_path, body, transport=transport, meeting=meeting)
    assert within(mine, "PeerError", 6) == QUOTED.format(
        0, "attach: ValueError: not built yet (train.py:LINE in named_parameters)"
    )
    assert code == 0 and other == (0, "", "")


STOPPED_WAITING = (
    "rank {0}, {1}: {2} has stopped waiting for a message that was under way in the process group, and what is sent "
    "now could be mixed up with it.\n  {3}\nCall detach() on what is attached, then use a new group, made on all "
    "ranks: process_group=torch.distributed.new_group()"
)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_a_second_try_to_attach_does_not_meet_what_the_first_has_sent(tmp_path: Path, transport: str) -> None:
    """Behind some seconds in the store ranks look in the transport as well; Gloo ended both where they tried again."""
    again = f"stretto.attach(model, transport={transport!r}"
    body = "        stretto.waiting.STORE_SECONDS = 0.3\n" + trying_again(
        transport, late=2, then=f"told(lambda: {again})); sync = {again}, process_group=dist.new_group())"
    )
    (code, mine, _), (other, printed, _) = ranks_that_fail_in_attach(tmp_path, body, transport=transport)
    assert code == other == 0, (mine, printed)
    first, second = mine.split("\nCommunicationError ")
    assert "rank 0, attach: rank 1 failed and left" in first
    cause = "PeerError: rank 0, attach: rank 1 failed and left, so nobody can complete this attach."
    told = STOPPED_WAITING.format(0, "attach", "this rank", cause)
    assert told in second and told in printed, (mine, printed)


@pytest.mark.ranks
def test_the_message_for_which_a_rank_has_stopped_waiting_is_not_summed_with_another_handles(tmp_path: Path) -> None:
    """Gloo sums whatever comes first: rank 1 got the mean of a gradient of one model and one of the other."""
    body = """
        import threading
        first, second = Model(), Model()
        for one in (first, second):
            stretto.attach(one, transport="process_group")

        def train(one, with_inputs):
            one.zero_grad()
            one(torch.full((1, 3), with_inputs)).backward()

        for one in (first, second):
            train(one, 1.0)
        if rank == 0:
            threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                train(first, 100.0)
            except KeyboardInterrupt:
                print("stopped")
        else:
            until_told(0)
            until_known(0)
        told(lambda: train(second, 1.0))
        stay()
    """
    (_, mine, _), (_, printed, _) = ranks(tmp_path, body, 2)
    own = STOPPED_WAITING.format(0, "pass 1", "this rank", "KeyboardInterrupt")
    assert mine.startswith("stopped\n") and own in mine
    assert within(printed, "PeerError", 3) == (
        "rank 1, pass 1: rank 0 failed and left, so nobody can complete this pass.\n"
        f"  rank 0, pass 2, backward: CommunicationError: {own}\n"
        "Remove the cause and start again, on all ranks."
    )


HOOK = """
    def hook(group, bucket):
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / world)
"""


@pytest.mark.ranks
def test_what_nobody_waits_for_any_more_is_not_left_to_threads_of_gloo(tmp_path: Path) -> None:
    """They would let go of it when the other rank ends, maybe amid the end of this one, which aborts the process."""
    body = """
        import gc, weakref
        sent, send = [], dist.ProcessGroup.allreduce

        def noted(*arguments):
            work = send(*arguments)
            sent.append(weakref.ref(work))
            return work

        step()
        dist.ProcessGroup.allreduce = noted
        step()
        if rank == 1:
            told(sync.detach)
        else:
            done = len(sent)
            told()
            gc.collect()
            print([one() is not None for one in sent[:done]], [one() is not None for one in sent[done:]])
        stay()
    """
    (_, printed, _), _ = ranks(tmp_path, body, transport="process_group")
    done, left = printed.splitlines()[-1].split("] [")
    assert done.count("False") == left.count("True") > 0 and "True" not in done and "False" not in left, printed


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["detached", "a hook beside shared memory", "attached anew", "another group"])
def test_nothing_is_sent_over_a_group_in_which_another_rank_has_left_something(tmp_path: Path, how: str) -> None:
    """Rank 0 waits in the first model; rank 1 leaves that and goes on with another."""
    hooked = how == "a hook beside shared memory"
    body = f"""
        import threading
        {textwrap.indent(textwrap.dedent(HOOK), " " * 8).strip()}

        def train(one, with_inputs=1.0):
            one.zero_grad()
            one(torch.full((1, 3), with_inputs)).backward()

        one, other = dist.new_group(), dist.new_group()
        first, second = Model(), Model()
        both = [one, other] if {how == "another group"} else []
        handle = stretto.attach(first, process_group=one, transport={"auto" if hooked else "process_group"!r})
        robin = stretto.attach(Model(), process_groups=both, transport="process_group") if both else None
        over = other if both else one
        beside = None
        if {how != "attached anew"}:
            beside = stretto.attach(second, process_group=over, transport={"auto" if hooked else "process_group"!r})
        if {hooked}:
            handle.register_comm_hook(None, hook), beside.register_comm_hook(None, hook)
        for model in (first, second):
            train(model)
        if rank == 0:
            told(lambda: train(first, 100.0))
            if {how == "another group"}:
                train(second); print("trained")
            else:
                until_told(1)
        else:
            time.sleep(1)
            handle.detach()
            until_told(0)
            if {how == "another group"}:
                time.sleep(2)  # until it is heard of
            elif {how != "attached anew"}:
                until_known(0)
            if {how == "attached anew"}:
                told(lambda: stretto.attach(second, process_group=one, transport="process_group"))
            else:
                told(lambda: (train(second), print("trained")))
    """
    (_, mine, _), (_, printed, _) = ranks(tmp_path, body)
    cause = "rank 1 finished after 1 pass (it was detached), so nobody can complete this one."
    assert f"rank 0, pass 2: {cause}" in mine
    if how == "another group":
        assert "trained" in mine and printed.startswith("trained")
        return
    when = "attach" if how == "attached anew" else "pass 1"
    assert within(printed, "PeerError", 6) == STOPPED_WAITING.format(
        1, when, "rank 0", f"rank 0, pass 2, waiting: PeerError: rank 0, pass 2: {cause}"
    )


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_who_is_stopped_amid_a_gather_is_quoted_by_those_who_come_to_it(tmp_path: Path, transport: str) -> None:
    """All have come together by then, so the place of this rank in the store says nothing."""
    body = """
        import threading
        step()
        together = stretto.peers.gather_by_sums
        def late(*how):
            time.sleep(2)
            return together(*how)
        if rank == 0:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                sync.check()
            except KeyboardInterrupt:
                print("stopped")
            told(sync.check)
            hang()
        stretto.peers.gather_by_sums = late
        told(sync.check)
    """
    (_, mine, _), (_, printed, _) = ranks(tmp_path, body, transport=transport)
    assert mine.startswith("stopped\n") and "this rank has failed and left" in mine
    assert within(printed, "PeerError", 8) == (
        "rank 1, pass 1: rank 0 failed and left, so nobody can complete this call.\n"
        "  rank 0, pass 1, waiting: KeyboardInterrupt\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
def test_whoever_has_attached_finds_nobody_of_that_where_the_next_begins(tmp_path: Path) -> None:
    body = """
        from stretto.channel import Channel
        sync.detach()
        go, catch_up = Channel.go, Channel.catch_up
        def look(channel, *counts):
            print([channel.line.check([f"here/{one}"]) for one in range(world)])
            catch_up(channel, *counts)
        if rank == 1:
            Channel.go = lambda channel: (time.sleep(0.5), go(channel))
        else:
            Channel.catch_up = look
        sync = stretto.attach(model)
    """
    assert ranks(tmp_path, body)[0] == (0, "[False, False]\n", "")


def check_that_a_second_try_works(folder: Path, body: str, patience: int) -> None:
    (code, mine, _), (other, *_) = ranks(folder, body, patience=patience)
    assert f"not done within {patience} s" in mine
    assert code == other == 0


@pytest.mark.ranks
def test_a_rank_that_has_given_up_waiting_in_attach_is_met_when_it_comes_again(tmp_path: Path) -> None:
    body = """
        sync.detach()
        if rank == 1:
            time.sleep(3)  # rank 0 looks for the cause then
        else:
            told(lambda: stretto.attach(model))
            time.sleep(2)
        for _ in range(5):
            try:
                sync = stretto.attach(model)
            except stretto.CommunicationError:
                continue
            break
        step()
        right()
    """
    check_that_a_second_try_works(tmp_path, body, patience=2)


@EVERYWHERE
@pytest.mark.ranks
def test_a_shorter_time_out_of_the_group_holds_from_the_next_pass_on(tmp_path: Path, transport: str) -> None:
    body = """
        step()
        change(datetime.timedelta(seconds=1))
        if rank == 1:
            hang()
        else:
            told()
    """
    found = ranks(tmp_path, body, transport=transport)
    told = explained(within(found[0][1], "CommunicationError", 12))
    over = {"auto": "shared_memory: {2}", "process_group": "process_group (gloo): {2}"}[transport]
    assert told.startswith(f"rank 0, pass 2: bucket 0 (b.bias) could not be reduced over {over}\n")


@EVERYWHERE
@pytest.mark.ranks
def test_a_longer_time_out_of_the_group_holds_from_the_next_pass_on(tmp_path: Path, transport: str) -> None:
    body = """
        change(datetime.timedelta(seconds=3))
        sync.detach()
        sync = stretto.attach(model, transport=transport)
        change(datetime.timedelta(seconds=100))
        time.sleep(5 * rank)
        step()
        right()
    """
    assert ranks(tmp_path, body, transport=transport, patience=100)[0][:2] == (0, "")


@pytest.mark.ranks
def test_a_first_pass_that_is_tried_again_counts_as_one(tmp_path: Path) -> None:
    """The handle has no name before its first pass, since nothing was exchanged."""
    body = """
        sync.detach()
        sync = stretto.attach(model, transport="process_group", init_sync=False)
        if rank == 0:
            told(step)
        time.sleep(4 * rank)
        step()
        sync.check()
    """
    check_that_a_second_try_works(tmp_path, body, patience=3)


@pytest.mark.ranks
def test_one_rank_alone_has_failed_in_attach_and_later_the_other_does(tmp_path: Path) -> None:
    """Attempts to attach are counted alike on all ranks, however many each of them has made."""
    body = """
        sync.detach()
        try_once() if rank == 0 else time.sleep(1)
        sync = stretto.attach(model)
        told(lambda: stretto.attach(Model())) if rank == 0 else try_once()
        if rank == 1:
            hang()
    """
    (_, mine, _), _ = ranks_that_fail_in_attach(tmp_path, body)
    cause = "attach: ValueError: not built yet (train.py:LINE in named_parameters)"
    assert within(mine, "PeerError", 6) == QUOTED.format(0, cause)


@pytest.mark.ranks
def test_a_rank_that_has_failed_in_attach_and_ends_is_named_to_the_one_that_tries_again(tmp_path: Path) -> None:
    body = """
        sync.detach()
        try_once()
        if rank == 0:
            time.sleep(1)
            told(lambda: stretto.attach(model))
    """
    (_, mine, _), _ = ranks_that_fail_in_attach(tmp_path, body, patience=SHORT)
    assert explained(within(mine, "CommunicationError", 13)) == NOT_HERE.format(
        0,
        "attach",
        "{2}",
        "in attach() at train.py:LINE in <lambda>",
        "rank 1 has not come back since it failed (ValueError: not built yet)",
        "stretto.attach",
    )


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["a copy", "without a word"])
def test_what_one_rank_alone_makes_without_a_word_is_no_attempt(tmp_path: Path, how: str) -> None:
    """Else its counts are ahead: it would hear of no failure, and be told to have gone apart where it is busy."""
    body = f"""
        import copy
        if rank == 0 and {how == "a copy"}:
            ddp = stretto.DistributedDataParallel(torch.nn.Linear(1, 1))
            other = copy.deepcopy(ddp)
        elif rank == 0:
            other = stretto.attach(torch.nn.Linear(1, 1), transport="process_group", init_sync=False)
        elif {how == "a copy"}:
            ddp = stretto.DistributedDataParallel(torch.nn.Linear(1, 1))
        step()
        stretto.inquiry.ASK_SECONDS = 0.3
        if rank == 0:
            time.sleep(3.3)
        step()
        told(lambda: stretto.attach(Model())) if rank == 0 else try_once()
        if rank == 1:
            hang()
    """
    (_, mine, _), (_, _, complaint) = ranks_that_fail_in_attach(tmp_path, body)
    assert "PeerError" not in complaint, complaint
    cause = "attach: ValueError: not built yet (train.py:LINE in named_parameters)"
    assert within(mine, "PeerError", 6) == QUOTED.format(0, cause)


@pytest.mark.ranks
def test_an_attempt_that_failed_before_one_rank_came_counts_on_none(tmp_path: Path) -> None:
    """Else they would be told to have gone apart, where one is only slow."""
    body = """
        step()
        try:
            stretto.attach((NotBuilt if rank == 0 else torch.nn.Linear)(2, 1))
        except (ValueError, stretto.PeerError) as error:
            print(type(error).__name__)
        step()
        stretto.inquiry.ASK_SECONDS = 0.3
        time.sleep(3.3 * rank)
        step()
        right()
    """
    (code, mine, complaint), (_, theirs, _) = ranks_that_fail_in_attach(tmp_path, body)
    assert (code, mine, theirs) == (0, "ValueError\n", "PeerError\n"), complaint


@pytest.mark.ranks
@pytest.mark.parametrize("when", ["in attach", "at its first pass"])
def test_ranks_that_attach_without_a_word_hear_of_each_other_all_the_same(tmp_path: Path, when: str) -> None:
    body = f"""
        sync.detach()
        how = dict(transport="process_group", init_sync=False)
        if rank == 1 and {when == "in attach"}:
            model.named_parameters = lambda *_, **__: exec('raise ValueError("not built yet")')
        try:
            sync = stretto.attach(model, **how)
            if rank == 1:
                stretto.peers.Peers.wait = lambda *_: exec('raise KeyboardInterrupt')
            step() if rank == 1 else told()
        except (ValueError, KeyboardInterrupt):
            pass
        if rank == 1:
            hang()
    """
    (_, mine, _), _ = ranks_that_fail_in_attach(tmp_path, body)
    told = within(mine, "PeerError", 6)
    assert ("ValueError: not built yet" if when == "in attach" else "KeyboardInterrupt") in told


@pytest.mark.ranks
def test_a_group_is_made_anew_after_attaching_has_failed(tmp_path: Path) -> None:
    """Whoever has the store ends with the group, and its port is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = f"""
        import gc
        sync.detach()
        dist.destroy_process_group()
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}", RANK=str(rank), WORLD_SIZE=str(world))
        for number in range(3):
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
            if number < 2:
                try_once()
                dist.destroy_process_group()
                gc.collect()
                open(f"{{folder}}/ended{{number}}.{{rank}}", "w")
                while not os.path.exists(f"{{folder}}/ended{{number}}.{{1 - rank}}"):
                    time.sleep(0.02)  # else a rank may meet the store that the other has yet to end
        sync = stretto.attach(model)
        step()
        print(sync.statistics.passes)
        sync.detach()
    """
    for code, printed, complaint in ranks_that_fail_in_attach(tmp_path, body):
        assert (code, printed) == (0, "1\n"), complaint


@pytest.mark.ranks
def test_a_rank_that_has_failed_in_attaching_another_model_is_quoted_in_the_passes_of_the_first(tmp_path: Path) -> None:
    """Its last words are those of a process that the others know; its store has gone when they look."""
    body = """
        step()
        if rank == 1:
            time.sleep(4)
            told()
            os._exit(0)
        try_once()
        try_once()
        raise KeyError("no third try")
    """
    _, (_, theirs, _) = ranks_that_fail_in_attach(tmp_path, body, meeting="tcp")
    assert within(theirs, "PeerError", 6) == LEFT.format(
        1, 2, "outside backward: KeyError: 'no third try' (train.py:LINE in <module>)"
    ).replace("rank 1 failed", "rank 0 failed").replace("  rank 1,", "  rank 0,")


@pytest.mark.ranks
@pytest.mark.parametrize("lives_on", [False, True])
def test_a_rank_that_cannot_start_its_thread_is_quoted(tmp_path: Path, lives_on: bool) -> None:
    body = f"""
        import contextlib
        def refuse(self):
            raise RuntimeError("can't start new thread")
        if rank == 1:
            stretto.line.Lookout.start = refuse
            with contextlib.suppress(RuntimeError if {lives_on} else KeyError):
                stretto.attach(Model())
            until_told(0)
        else:
            told(lambda: stretto.attach(Model()))
    """
    found = ranks_without_a_model(tmp_path, body, 2, end=False)
    assert within(found[0][1], "PeerError", 6) == (
        "rank 0, attach: rank 1 failed and left, so nobody can complete this attach.\n"
        "  rank 1, attach: RuntimeError: can't start new thread (train.py:LINE in refuse)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
def test_the_rank_that_has_the_store_stays_for_nobody_who_has_failed_too(tmp_path: Path) -> None:
    """They have come and left between two looks, mostly."""
    body = """
        model = Model().requires_grad_(False)
        for _ in range(3):
            dist.barrier()
            began = time.monotonic()
            try:
                stretto.attach(model)
            except stretto.SetupError:
                assert time.monotonic() - began < 1.5
    """
    assert ranks_without_a_model(tmp_path, body, 2, meeting="tcp") == [(0, "", "")] * 2


@pytest.mark.ranks
def test_the_rank_that_has_the_store_fails_alone_in_attach_and_ends(tmp_path: Path) -> None:
    """It stays until the others have read why, or the store would go with it first."""
    body = """
        class Broken(Model):
            def named_buffers(self, *_, **__):
                raise ValueError("no vocabulary")
        if rank == 0:
            stretto.attach(Broken())
        told(lambda: stretto.attach(Model()))
    """
    _, (_, told, _) = ranks_without_a_model(tmp_path, body, 2, meeting="tcp")
    assert within(told, "PeerError", 6) == (
        "rank 1, attach: rank 0 failed and left, so nobody can complete this attach.\n"
        "  rank 0, attach: ValueError: no vocabulary (train.py:LINE in named_buffers)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_killed_while_others_attach_is_named(tmp_path: Path, world: int) -> None:
    body = """
        step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        told(lambda: stretto.attach(Model()))
    """
    found = ranks(tmp_path, body, world)
    for rank in {0, 2} & set(range(world)):
        told = within(found[rank][1], "PeerError", 6)
        assert told == DIED.format(rank).replace("pass 2", "attach").replace("this pass", "this attach")


# A pass


def test_what_the_system_has_refused_this_rank_needs_no_other_to_blame() -> None:
    def error(cause: BaseException | None, text: str = "no") -> stretto.CommunicationError:
        made = stretto.CommunicationError(text)
        made.__cause__ = cause
        return made

    assert is_told(error(OSError(errno.EMFILE, "Too many open files")))
    assert not is_told(error(OSError(errno.ESTALE, "its memory has gone with it")))
    assert not is_told(error(RuntimeError("Connection closed by peer")))
    assert is_told(error(None, "rank 1 cannot go on: no memory"))


@pytest.mark.parametrize(("who", "ranks"), [("rank 0", [0]), ("ranks 0, 12", [0, 12])])
def test_who_failed_for_want_of_others_is_not_blamed_by_these(who: str, ranks: list[int]) -> None:
    """They would quote each other, and neither its own error."""
    text = f"PeerError: rank 1, pass 5: {who} failed and left, so nobody can complete this call."
    note = Note(1, "outside backward", error=text, leaves=True)
    assert [rank for rank in range(13) if note.is_for_want_of(rank)] == ranks


@pytest.mark.ranks
@pytest.mark.parametrize(("transport", "world"), [("process_group", 2), ("auto", 3)])
def test_a_rank_that_is_killed_while_all_follow_a_change_is_named(tmp_path: Path, world: int, transport: str) -> None:
    body = """
        step()
        model.b = torch.nn.Linear(3, 1)
        if rank == 1:
            sync._reducer._rejoin.all_together = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        told()
        stay(but=1)
        os._exit(0)
    """
    found = ranks(tmp_path, body, world, transport=transport)
    for rank in {0, 2} & set(range(world)):
        assert within(found[rank][1], "PeerError", 6) == DIED.format(rank)


@EVERYWHERE
@pytest.mark.ranks
def test_a_rank_that_hangs_while_all_follow_a_change_is_named(tmp_path: Path, transport: str) -> None:
    body = """
        step()
        model.b = torch.nn.Linear(3, 1)
        if rank == 1:
            sync._reducer._rejoin.all_together = hang
        told()
    """
    found = ranks(tmp_path, body, patience=SHORT, transport=transport)
    told = explained(within(found[0][1], "CommunicationError", 13))
    over = {"auto": "shared_memory: {2}", "process_group": "process_group (gloo): {2}"}[transport]
    assert told == (
        f"rank 0, pass 2: what ranks hold could not be gathered over {over}\n"
        "rank 0 waits at train.py:LINE in step; rank 1 has begun 2 passes and is at train.py:LINE in hang.\n"
        "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
    )


SPARSE = """
    sync.detach()
    torch.manual_seed(0)
    rows = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
    sync = stretto.attach(rows, transport=transport)

    def once():
        rows(torch.tensor([rank])).sum().backward()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "world", "transport"),
    [
        ("detached", 2, "auto"),
        ("killed", 3, "auto"),
        ("killed", 2, "process_group"),
        ("hangs", 2, "auto"),
        ("hangs", 3, "process_group"),
    ],
)
def test_waiting_for_rows_of_sparse_gradients(tmp_path: Path, how: str, world: int, transport: str) -> None:
    body = f"""
        once()
        if rank == 1 and {how == "detached"}:
            sync.detach()
            hang()
            os._exit(0)
        if rank == 1:
            sync._reducer.sparse.exchange = hang if {how == "hangs"} else lambda *_: os.kill(os.getpid(), 9)
        told(once)
        stay(but=1)
        os._exit(0)
    """
    found = ranks(
        tmp_path, textwrap.dedent(SPARSE) + textwrap.dedent(body), world, patience=SHORT, transport=transport, end=False
    )
    for rank in {0, 2} & set(range(world)):
        if how == "killed":
            assert within(found[rank][1], "PeerError", 6) == DIED.format(rank)
        elif how == "detached":
            assert "rank 1 finished after 1 pass (it was detached)" in within(found[rank][1], "PeerError", 6)
        else:
            told = explained(within(found[rank][1], "CommunicationError", 13))
            assert "the sparse gradients of 0.weight could not be reduced over " in told
            assert "; rank 1 has begun 2 passes and is at train.py:LINE in hang" in told


ALLREDUCE_HOOK = r"torch\.distributed\.algorithms\.ddp_comm_hooks\.default_hooks\.allreduce_hook"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "world", "transport"),
    [("detached", 2, "auto"), ("killed", 3, "process_group"), ("hangs", 2, "process_group")],
)
def test_waiting_for_a_comm_hook(tmp_path: Path, how: str, world: int, transport: str) -> None:
    body = f"""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        sync.register_comm_hook(None, allreduce_hook)
        step()
        if rank == 1:
            if {how == "detached"}:
                sync.detach()
                hang()
                os._exit(0)
            hang() if {how == "hangs"} else os.kill(os.getpid(), 9)
        else:
            told()
            stay(but=1)
        os._exit(0)
    """
    found = ranks(tmp_path, body, world, patience=SHORT, transport=transport)
    for rank in {0, 2} & set(range(world)):
        if how == "killed":
            assert within(found[rank][1], "PeerError", 6) == DIED.format(rank)
        elif how == "detached":
            assert "rank 1 finished after 1 pass (it was detached)" in within(found[rank][1], "PeerError", 6)
        else:
            told = within(found[rank][1], "CommunicationError", 14)
            assert re.match(
                rf"rank 0, pass 2: bucket \d \([a-z.]+\) could not be reduced by comm hook {ALLREDUCE_HOOK}: ", told
            )
            assert "; rank 1 has begun 1 pass and is at train.py:LINE in hang" in told


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["process_group"])
@pytest.mark.parametrize(
    ("how", "phase", "error"),
    [("wrong", "forward", "KeyError: 'no such token'"), ("before", "backward", "ValueError: bad label")],
)
def test_who_waits_for_a_rank_that_failed_before_the_pass_is_told_of_it_meanwhile(
    tmp_path: Path, transport: str, how: str, phase: str, error: str
) -> None:
    body = f"""
        step()
        if rank == 1:
            told({how}=True)
            time.sleep(2)
        told()
        step(); right()
    """
    (_, printed, complaint), (_, other, _) = ranks(tmp_path, body, transport=transport)
    note = f"rank 1, pass 2, {phase}: {error} (train.py:LINE in {phase})"
    waits = f"rank 0, pass 2: this rank waits, because {phase} has failed on another rank.\n  {note}"
    assert re.sub(r"py:\d+", "py:LINE", complaint) == f"stretto: {waits}\n"
    assert f"  {note}\n" in within(printed, "PeerError", 8)
    assert error.partition(":")[0] in other and "PeerError" in other


# reduce()


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "world"), [("hangs", 2), ("killed", 3)])
def test_waiting_in_reduce(tmp_path: Path, how: str, world: int) -> None:
    body = f"""
        if rank == 1:
            hang() if {how == "hangs"} else os.kill(os.getpid(), signal.SIGKILL)
        else:
            told(lambda: stretto.reduce([torch.ones(4)]))
    """
    found = ranks_without_a_model(tmp_path, body, world, patience=SHORT, end=False)
    for rank in {0, 2} & set(range(world)):
        told = explained(within(found[rank][1], "CommunicationError", 13))
        assert told.startswith(
            f"rank {rank}, reduce: what ranks hold could not be gathered over process_group (gloo): "
        )
        assert "rank 1 has not come here so far" in told
        assert told.endswith(
            "Expected every rank to call stretto.reduce. Look at the first error in the other ranks' logs."
        )


@pytest.mark.ranks
def test_a_late_rank_that_reduces_other_tensors_is_told(tmp_path: Path) -> None:
    """Only who has waited asks in the store: the other knows nothing of it, and must not be awaited there."""
    body = "time.sleep(1.2 * rank); told(lambda: stretto.reduce([torch.ones(3 + rank)]))"
    for code, printed, _ in ranks_without_a_model(tmp_path, body, 2, patience=6.0):
        assert code == 0
        assert within(printed, "ModelMismatchError", 3).startswith("reduce: the 2 ranks do not give the same tensors.")


def _reduce_differently(rank: int) -> list[str]:
    said = []
    for tensors, how in [
        ([torch.ones(4 + rank), torch.ones(2)], {}),
        ([torch.ones(4, dtype=torch.float64 if rank else torch.float32)], {}),
        ([torch.ones(4)] * (1 + rank), {}),
        ([torch.ones(4)], {"op": "sum" if rank else "mean"}),
        ([torch.ones(4, dtype=torch.int64 if rank else torch.float32)], {}),
    ]:
        try:
            stretto.reduce(tensors, **how)
        except stretto.SetupError as error:
            said.append(f"{type(error).__name__}: {error}")
    mine = torch.full((3,), float(rank))
    stretto.reduce([mine.t(), None])
    return [*said, float(mine[0])]


DIFFER = "ModelMismatchError: reduce: the {0} ranks do not give the same tensors.\n  {1}\n{2}"
SAME = "Give the same tensors in the same order on every rank."


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_reduce_different_tensors_are_told_the_same(world: int) -> None:
    """Gloo ends the process where messages differ in length."""
    if world == 3:
        found = spawn_ranks(_reduce_differently, 3)
        assert "(4,) float32 on rank 0; (5,) float32 on rank 1; (6,) float32 on rank 2" in found[2][0]
        assert found[0][:3] == found[1][:3] == found[2][:3]
        return
    first, second = spawn_ranks(_reduce_differently, 2)
    assert (
        first[:4]
        == second[:4]
        == [
            DIFFER.format(2, "tensor 0: (4,) float32 on rank 0; (5,) float32 on rank 1", SAME),
            DIFFER.format(2, "tensor 0: (4,) float32 on rank 0; (4,) float64 on rank 1", SAME),
            DIFFER.format(2, "tensor 1: missing on rank 0; (4,) float32 on rank 1", SAME),
            DIFFER.format(2, "option op, bucket_cap_mb: ('mean', 10) on rank 0; ('sum', 10) on rank 1", SAME),
        ]
    )
    problem = "reduce: tensor 0 is torch.int64: give one of a floating dtype that can be added, tensor.float()"
    assert second[4] == f"UnsupportedError: {problem}"
    told = f"reduce, rank 0: other ranks cannot take part, so this one cannot either:\n  rank 1: {problem}"
    assert first[4] == f"ModelMismatchError: {told}"
    assert first[5] == second[5] == 0.5


# Handles: their names, copies of them, groups that are gone


@pytest.mark.ranks
@pytest.mark.parametrize(("transport", "world"), [("auto", 2), ("process_group", 3)])
def test_a_copy_on_one_rank_is_its_own_affair(tmp_path: Path, world: int, transport: str) -> None:
    body = """
        import copy, gc, pickle
        from stretto import DistributedDataParallel as DDP

        first = DDP(Model(), transport=transport)
        first(x).backward()
        if rank == 0:
            average, again = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
            average(x)
            del average, again
            gc.collect()
        second = DDP(Model(), transport=transport)
        for _ in range(2):
            time.sleep(1.5 * (rank == 0))  # the others read notes meanwhile
            second(x).backward()
            first(x).backward()
        if rank == 1:
            second.synchronizer.detach()
            hang()
            os._exit(0)
        told(lambda: second(x).backward())
    """
    found = ranks(tmp_path, body, world, end=False, transport=transport)
    assert found[1][:2] == (0, ""), found
    for rank in {0, 2} & set(range(world)):
        assert "rank 1 finished after 2 passes (it was detached)" in within(found[rank][1], "PeerError", 5)


@pytest.mark.ranks
def test_copies_on_all_ranks_train(tmp_path: Path) -> None:
    body = """
        import copy
        from stretto import DistributedDataParallel as DDP

        first = DDP(Model())
        first(x).backward()
        if rank == 0:
            copy.deepcopy(first)
        second = copy.deepcopy(first)
        for _ in range(3):
            second.zero_grad()
            second(x).backward()
        model = second.module
        right()
        if rank == 1:
            second.synchronizer.detach()
            hang()
        else:
            told(lambda: second(x).backward())
    """
    found = ranks(tmp_path, body)
    assert found[1] == (0, "", "")
    assert "rank 1 finished after 3 passes (it was detached)" in within(found[0][1], "PeerError", 4)


def _after_the_group(rank: int) -> str:
    threads = len(sys._current_frames())
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for transport in ("auto", "process_group"):
        handle = stretto.attach(model, transport=transport)
        wrapped = DDP(other, transport=transport)
        for one in (model, wrapped):
            one(torch.ones(1, 2)).sum().backward()
        folder = os.environ["STRETTO_MEETING"]
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{transport}", rank=rank, world_size=2)
        handle.detach()
        handle.detach()
        stretto.attach(model, transport=transport).detach()
        again = DDP(wrapped.module, transport=transport)
        again.zero_grad()
        again(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert torch.equal(other.weight.grad, torch.full((1, 2), 1.5))
        again.synchronizer.detach()
    return f"{len(sys._current_frames()) - threads} more threads"


@pytest.mark.ranks
def test_a_destroyed_group_keeps_nobody(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("STRETTO_MEETING", str(tmp_path))
    assert spawn_ranks(_after_the_group, 2) == ["0 more threads"] * 2


def _one_thread_for_all(rank: int) -> int:
    keep = [stretto.attach(torch.nn.Linear(2, 1)) for _ in range(5)]
    found = [thread.name for thread in threading.enumerate()].count("stretto")
    for sync in keep:
        sync.detach()
    return found + [thread.name for thread in threading.enumerate()].count("stretto")


@pytest.mark.ranks
def test_handles_of_one_group_share_a_thread() -> None:
    assert spawn_ranks(_one_thread_for_all, 2) == [1, 1]


# Launchers of multiprocessing

LAUNCHED = """
import sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp, stretto


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = torch.nn.Linear(4, 4)
    stretto.attach(model)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        raise ValueError("bad label")
    try:
        model(torch.ones(2, 4)).sum().backward()
    except stretto.PeerError as error:
        open(f"{folder}/said", "w").write(str(error))


if __name__ == "__main__":
    how, folder = sys.argv[1:]
    if how == "mp.spawn":
        mp.spawn(work, (folder,), nprocs=2)
    context = mp.get_context(how)
    processes = [context.Process(target=work, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["mp.spawn", "spawn", "fork", "forkserver"])
def test_what_ends_a_child_of_multiprocessing_is_quoted(tmp_path: Path, how: str) -> None:
    (tmp_path / "launch.py").write_text(LAUNCHED)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = warm_programs.run([tmp_path / "launch.py", how, tmp_path], timeout=60, env=environment)
    assert "ValueError: bad label" in done.stderr
    if how == "mp.spawn" and not (tmp_path / "said").exists():
        return  # it terminates the others as soon as it sees one end
    told = "outside backward: ValueError: bad label (launch.py:LINE in work)"
    if sys.version_info >= (3, 13):  # the exit handlers of a child run when its exception is gone
        told = "before it ended: failed; its own log has the error"
    assert re.sub(r"py:\d+", "py:LINE", (tmp_path / "said").read_text()) == (
        "rank 0, pass 2: rank 1 failed and left, so nobody can complete this pass.\n"
        f"  rank 1, pass 2, {told}\n"
        "Remove the cause and start again, on all ranks."
    )


# A pass that cannot be given up


@pytest.mark.ranks
@pytest.mark.parametrize("again", ["", " again"])
def test_a_rank_that_cannot_give_up_says_that_it_is_lost(tmp_path: Path, again: str) -> None:
    """Why not, unless it is for what backward has raised, which the user reads anyway."""
    body = f"""
        calls = []

        def hook(state, bucket):
            if rank == 1 and sync.statistics.passes == 1:
                calls.append(bucket)
                raise OSError("hook broke" + {again!r} * (len(calls) > 1))
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / world)

        sync.register_comm_hook(None, hook)
        step()
        told()
        if rank == 1:
            told()
        stay()
        os._exit(0)
    """
    (_, printed, _), (_, other, complaint) = ranks(tmp_path, body)
    assert within(printed, "PeerError", 6) == LEFT.format(0, 2, "backward: OSError: hook broke (train.py:LINE in hook)")
    said = "rank 1, pass 2: backward failed, and the pass could not be given up."
    assert complaint.startswith(f"stretto: {said}\nTraceback") if again else not complaint
    first, second = other.split("CommunicationError", 1)
    assert within(first, "OSError", 3) == "hook broke"
    assert within("CommunicationError" + second, "CommunicationError", 3) == (
        "rank 1, pass 2: this rank has failed and left, so it has lost its place among the others.\n"
        "  OSError: hook broke\nRemove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
@pytest.mark.parametrize("before", [0, 1, 3])
def test_ctrl_c_amid_a_wait_over_a_process_group(tmp_path: Path, before: int) -> None:
    """The pass goes on without the rank: what it does next is not to be summed with it, nor taken for the next one."""
    body = f"""
        import threading

        def waits():
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame is not None and frame.f_code.co_name != "done_within":
                frame = frame.f_back
            return frame is not None

        def interrupt():
            while not waits():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        for _ in range({before}):
            step(); right()
        if rank == 0:
            threading.Thread(target=interrupt).start()
            try:
                step()
            except KeyboardInterrupt:
                model.zero_grad(set_to_none=False)
                told()
            while not os.path.exists(f"{{folder}}/told1"):
                time.sleep(0.01)
        else:
            while not os.path.exists(f"{{folder}}/told0"):
                time.sleep(0.01)
            if {before}:
                step(); right()
            told()
        os._exit(0)
    """
    (_, printed, _), (_, other, _) = ranks(tmp_path, body, transport="process_group")
    assert within(printed, "CommunicationError", 3) == (
        f"rank 0, pass {before + 1}: this rank has failed and left, so it has lost its place among the others.\n"
        "  KeyboardInterrupt\nRemove the cause and start again, on all ranks."
    )
    assert within(other, "PeerError", 6) == (
        f"rank 1, pass {before + 1 + bool(before)}: rank 0 failed and left, so nobody can complete this pass.\n"
        f"  rank 0, pass {before + 1}, backward: KeyboardInterrupt (train.py:LINE in step)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("transport", "again"),
    [
        ("process_group", ""),
        ("auto", "sync.register_comm_hook(None, fp16_compress_hook)"),  # what is under way is the hook's alone
        ("process_group", "sync = attach(process_groups=[dist.new_group(), dist.new_group()])"),
    ],
    ids=["process group", "comm hook beside shared memory", "round robin"],
)
def test_who_is_left_by_one_that_lives_on_can_let_go_of_the_group(tmp_path: Path, transport: str, again: str) -> None:
    """Gloo's waits, when it is freed, for what is under way in it."""
    body = f"""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        def attach(process_groups):
            sync.detach()
            return stretto.attach(model, bucket_cap_mb=1e-5, process_groups=process_groups, transport=transport)

        {again}
        step()
        if rank == 1:
            told()
            dist.destroy_process_group()
            open(f"{{folder}}/free", "w").close()
        else:
            sync.detach()
            until = time.monotonic() + 20
            while not os.path.exists(f"{{folder}}/free") and time.monotonic() < until:
                time.sleep(0.01)
            print(os.path.exists(f"{{folder}}/free"), flush=True)
        os._exit(0)
    """
    (_, freed, _), (_, printed, _) = ranks(tmp_path, body, transport=transport)
    assert within(printed, "PeerError", 6).startswith("rank 1, pass 2: rank 0 finished after 1 pass (it was detached)")
    assert freed == "True\n", "rank 1 waited for this one's end"


@pytest.mark.ranks
def test_ranks_whose_collective_has_failed_do_not_wait_for_each_other_to_let_go_of_the_group(tmp_path: Path) -> None:
    """One bucket has failed for a rank that died; for a later one each waits for another that has failed likewise."""
    body = """
        transport = stretto.transport.ProcessGroupTransport()
        if rank == 2:
            os._exit(0)
        left = transport.broadcast(torch.zeros(4), 1 - rank)  # which that one does not send
        failed = transport.broadcast(torch.zeros(4), 2)
        try:
            failed.wait()
        except RuntimeError as error:
            transport.abandon(failed, "", str(error))
        del transport
        began = time.monotonic()
        dist.destroy_process_group()
        print(left.is_completed(), time.monotonic() - began < 5.0, flush=True)
        open(f"{folder}/told{rank}", "w").close()
        until_told(1 - rank)
        os._exit(0)
    """
    for _, printed, complaint in ranks_without_a_model(tmp_path, body, 3, patience=10.0)[:2]:
        assert printed == "False True\n", complaint


@pytest.mark.ranks
def test_a_hook_that_fails_once_leaves_all_ranks_in_step(tmp_path: Path) -> None:
    body = """
        calls = 0

        def hook(state, bucket):
            global calls
            calls += 1
            if rank == 1 and calls == 6:
                raise OSError("hook broke")
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / world)

        sync.register_comm_hook(None, hook)
        step(); right()
        told()
        step(); right()
    """
    (code, printed, complaint), (other, _, _) = ranks(tmp_path, body)
    assert (code, other, complaint) == (0, 0, "")
    assert "rank 1, pass 2, backward: OSError: hook broke" in within(printed, "PeerError", 3)


NO_FUTURE = (
    "TypeError: comm hook __main__.hook returned a NoneType, not a torch.futures.Future of the reduced flat tensor.\n"
    "Return the future of the collective, dist.all_reduce(tensor, async_op=True).get_future(); or one that is done: "
    "future = torch.futures.Future(); future.set_result(tensor)."
)
FAILS_BEHIND_WHAT_IT_SENDS = {
    "raises": ('raise OSError("hook broke")', "OSError: hook broke"),
    "returns no future": ("return None", NO_FUTURE),
    "fails in a callback": (
        'return work.get_future().then(lambda _: time.sleep(0.3) or {}["no such key"])',
        "CommunicationError: rank 1, pass 2: bucket 0 (b.bias) could not be reduced by comm hook __main__.hook: Got "
        "the following error when running the callback: KeyError: 'no such key'",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("bucket", [0, 3], ids=["first bucket", "last bucket"])
def test_a_callback_that_fails_before_it_sends_more_is_told_in_that_pass(tmp_path: Path, bucket: int) -> None:
    """Its future was done before anybody asked: the next bucket left, and Gloo ended a rank."""
    body = f"""
        def hook(state, bucket):
            small = torch.ones(1)

            def then(_):
                if rank == 1 and sync.statistics.passes == 1 and bucket.index() == {bucket}:
                    raise KeyError("no such key")
                return dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()

            def last(future):
                future.value().wait()
                return bucket.buffer()

            sent = dist.all_reduce(small, async_op=True).get_future().then(then)
            time.sleep(0.1)
            return sent.then(last)

        sync.register_comm_hook(None, hook)
        step(); right()
        told()
        time.sleep(3 * (rank == 1))
        os._exit(0)
    """
    (code, printed, complaint), (other, failed, complained) = ranks(tmp_path, body)
    assert (code, other, complaint, complained) == (0, 0, "", "")
    assert "rank 1, pass 2, backward: CommunicationError: rank 1, pass 2: bucket" in within(printed, "PeerError", 9)
    assert "could not be reduced by comm hook __main__.hook" in within(failed, "CommunicationError", 9)


@pytest.mark.ranks
def test_an_optimizer_that_fails_in_backward_behind_an_earlier_bucket_is_told_in_that_pass(tmp_path: Path) -> None:
    """Its sum was there when the next bucket left, and the step had not been tried: the others stepped all."""
    body = """
        import warnings
        from torch.distributed.optim import _apply_optimizer_in_backward

        warnings.simplefilter("ignore")
        sync.detach()

        class Slowly(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                time.sleep(0.2)
                return gradient

        class Breaks(torch.optim.SGD):
            def step(self, closure=None):
                if rank == 1 and ddp.synchronizer.statistics.passes == 1:
                    raise ValueError("optimizer broke")
                return super().step(closure)

        _apply_optimizer_in_backward(Breaks, model.parameters(), {"lr": 0.05})
        ddp = stretto.DistributedDataParallel(model, bucket_cap_mb=1e-5)
        model.b.register_forward_pre_hook(lambda module, inputs: (Slowly.apply(*inputs),))
        ddp(x).sum().backward()
        try:
            ddp(x).sum().backward()
        except (ValueError, stretto.PeerError) as error:
            print(error)
        time.sleep(2 * (rank == 1))
        os._exit(0)
    """
    (code, printed, complaint), (other, failed, complained) = ranks(tmp_path, body)
    assert (code, other, complaint, complained) == (0, 0, "", "")
    assert failed == "optimizer broke\n"
    assert printed.startswith(
        "rank 0, pass 2: rank 1 failed and left, so nobody can complete this pass.\n"
        "  rank 1, pass 2, backward: ValueError: optimizer broke ("
    )


@pytest.mark.ranks
def test_ctrl_c_while_powersgd_waits_for_a_slow_rank_leaves_all_in_step(tmp_path: Path) -> None:
    """The bucket that it waited for was forgotten, the hook called beside it for the rest, and all ranks hung."""
    body = """
        import signal, threading
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as P

        sync.detach()
        model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
        sync = stretto.attach(model, bucket_cap_mb=0.004, transport=transport)
        state = P.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        sync.register_comm_hook(state, P.powerSGD_hook)

        def step():
            model.zero_grad()
            model(torch.ones(2, 32) * (1 + rank)).square().mean().backward()

        for _ in range(4):
            step()
        dist.barrier()
        if rank == 0:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.5)
        try:
            step()
        except (KeyboardInterrupt, stretto.PeerError) as error:
            print(type(error).__name__)
        step()
        print([p.grad.sum().item() for p in model.parameters()])
        dist.barrier()
        os._exit(0)
    """
    (code, one, complaint), (other, second, complained) = ranks(tmp_path, body)
    assert (code, other, complaint, complained) == (0, 0, "", "")
    (name, found), (told, same) = one.splitlines(), second.splitlines()
    assert (name, told, found) == ("KeyboardInterrupt", "PeerError", same)


@pytest.mark.ranks
@pytest.mark.parametrize("how", FAILS_BEHIND_WHAT_IT_SENDS)
def test_a_rank_whose_hook_fails_behind_what_it_sends_takes_part_in_nothing_more(tmp_path: Path, how: str) -> None:
    """Were the hook called again, it would send its bucket twice; were the pass given up, the next be one behind."""
    statement, error = FAILS_BEHIND_WHAT_IT_SENDS[how]
    body = f"""
        called = []

        def hook(state, bucket):
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            called.append(bucket.index())
            if rank == 1 and sync.statistics.passes == 1:
                {statement}
            return work.get_future().then(lambda f: f.value()[0] / world)

        sync.register_comm_hook(None, hook)
        step(); right()
        told()
        told()
        print(called)
        time.sleep(3 * (rank == 1))
        os._exit(0)
    """
    (code, printed, complaint), (other, failed, complained) = ranks(tmp_path, body)
    assert (code, other, complaint, complained) == (0, 0, "", "")
    first, second = re.split(r"^(?=\w+ after )", printed, flags=re.MULTILINE)[1:]
    assert f"rank 1, pass 2, backward: {error}" in within(first, "PeerError", 8)
    assert "lost its place among the others" in within(second, "CommunicationError", 3)
    _, again = re.split(r"^(?=\w+ after )", failed, flags=re.MULTILINE)[1:]
    assert within(again, "CommunicationError", 3).startswith(
        f"rank 1, pass 2: this rank has failed and left, so it has lost its place among the others.\n  {error}"
    )
    assert failed.endswith("[0, 1, 2, 3, 0]\n")


# Changes beside a comm hook, and looks at the replicas beside ranks that have no batches


@pytest.mark.parametrize("world", [2, 3])
def test_a_layer_added_on_one_rank_beside_a_comm_hook_is_told_by_all(world: int) -> None:
    def worker(transport):
        def hook(_, bucket):
            transport.all_reduce(bucket.buffer().div_(world)).wait()
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        sync = stretto.attach(model, transport=transport)
        sync.register_comm_hook(None, hook)
        model(torch.ones(1, 2)).sum().backward()
        if transport.rank == 1:
            model.append(torch.nn.Linear(2, 1))
        with pytest.raises(stretto.SetupError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        return str(caught.value)

    assert run_ranks(worker, world) == [
        f"rank {rank}, pass 2: the module has changed since it was attached (2 parameters added (1.weight, 1.bias) on "
        "rank 1), and a comm hook keeps its state by bucket, so the plan cannot follow.\n"
        "Attach again after such a change, on all ranks: sync.detach(); sync = stretto.attach(model)"
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_batches_takes_part_in_looking_at_replicas(world: int) -> None:
    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport, check_every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            if transport.rank == 1 and number > 1:
                sync.shadow_pass()  # and no step: its values stay behind
                continue
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + transport.rank)).sum().backward()
            optimizer.step()
        if transport.rank != 1:
            with torch.no_grad():
                model.bias += transport.rank
            with pytest.raises(stretto.ReplicaError) if world == 3 else contextlib.nullcontext():
                model(torch.ones(1, 2)).sum().backward()
        else:
            with pytest.raises(stretto.ReplicaError) if world == 3 else contextlib.nullcontext():
                sync.shadow_pass()

    run_ranks(worker, world, timeout=10)


def _join_and_check(rank: int) -> int:
    model = DDP(torch.nn.Linear(2, 1), check_every=1)
    with model.join():
        for _ in range(2 + 2 * rank):
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return model.synchronizer.statistics.passes


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_join_beside_looks_at_the_replicas(world: int) -> None:
    assert len(spawn_ranks(_join_and_check, world)) == world


def _join_with_buffers(rank: int) -> torch.Tensor:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = DDP(module, check_every=1)
    with model.join():
        for number in range(2 + rank):
            model(torch.tensor([[1.0 + rank, 2.0], [number, 0.0]])).square().sum().backward()
    return module[1].running_mean


@pytest.mark.ranks
def test_join_looks_at_no_buffers_which_follow_one_rank_in_the_next_forward_only() -> None:
    """And in the end those are everyone's."""
    first, second = spawn_ranks(_join_with_buffers, 2)
    assert torch.equal(first, second)


@pytest.mark.ranks
def test_the_drop_in_and_the_compiler_tell_too(tmp_path: Path) -> None:
    body = """
        from stretto import DistributedDataParallel as DDP

        for model in (DDP(Model()), DDP(torch.compile(Model(), backend="eager"))):
            for number in range(4 + rank):
                model.zero_grad()
                told(lambda: model(x, wrong=rank == 1 and number == 2).backward())
        part = torch.nn.Linear(3, 1)
        whole, model = torch.compile(part, backend="eager", fullgraph=True), DDP(part)
        for number in range(3):
            model.zero_grad()
            whole(x).sum().backward()
            assert torch.equal(part.bias.grad, torch.full((1,), 2.0))
    """
    for code, printed, complaint in ranks(tmp_path, body):
        assert code == 0, complaint
        assert printed.count("PeerError") == 2 and printed.count("  rank 1, pass 3, forward: ") == 2, printed


def test_what_ranks_gather_may_be_more_than_2_gib() -> None:
    """Pages that nobody touches, so this takes no memory."""

    def all_reduce(flat: torch.Tensor) -> None:
        if flat.dtype is torch.int64:
            flat[1] = 1 << 31
        else:
            data, begin = pickle.dumps("there"), len(flat) - (1 << 31)
            flat[begin : begin + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    transport = SimpleNamespace(rank=0, world_size=2, all_reduce=all_reduce)
    assert gather_by_sums("here", transport, lambda work: None) == ["here", "there"]
