"""A store that does not answer, since whoever has it was stopped: nobody waits there, and it is told."""

from __future__ import annotations

import gc
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_peers import LEFT, ranks, within
from test_waits import explained, ranks_without_a_model

from stretto import line
from stretto.awaited_keys import AwaitedKeys, Silent
from stretto.channel import Channel
from stretto.inquiry import Inquiry
from stretto.line import Job, Line, Lookout
from stretto.notes import Note
from stretto.seat import Seat
from stretto.sockets import cloned, is_closed

pytestmark = pytest.mark.timeout(60)
SILENT = (
    "rank 1, pass 2: bucket 0 (b.bias) could not be reduced over {0}: {2}\n"
    "rank 1 waits at train.py:LINE in step; rank 0 is stopped by a signal or a debugger (pid PID); the process group's "
    "store, which rank 0 has, does not answer.\n"
    "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
)

RANK_0_STOPS = """
pid = torch.tensor(os.getpid())
dist.broadcast(pid, 0)
step()
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""Its block goes on with what follows."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("transport", "name"), [("auto", "shared_memory"), ("process_group", "process_group (gloo)")], ids=["auto", "gloo"]
)
def test_the_rank_that_has_the_store_is_stopped(tmp_path: Path, transport: str, name: str) -> None:
    """Its server is stopped with it, and the others' sockets wait for as long."""
    body = """
else:
    told()
    os.kill(int(pid), signal.SIGCONT)
os._exit(0)
"""
    found = ranks(tmp_path, RANK_0_STOPS + body, 2, "tcp", patience=4.0, transport=transport)
    assert [code for code, _, _ in found] == [0, 0], found
    told = explained(within(found[1][1], "CommunicationError", 15))
    assert told == SILENT.replace("{0}", name)


@pytest.mark.ranks
@pytest.mark.parametrize("detached", [False, True])
def test_a_store_that_answers_while_the_interpreter_shuts_down_ends_no_process(tmp_path: Path, detached: bool) -> None:
    """A thread that waited for it would come back from C++ then, and Python ends such threads: "terminate called"."""
    body = f"""
    time.sleep(5)
    os._exit(0)

class Last:
    def __del__(self, kill=os.kill, pid=int(pid), goes_on=signal.SIGCONT, sleep=time.sleep, write=os.write):
        kill(pid, goes_on)
        sleep(1)
        write(1, b"the store has answered")

time.sleep(1.5)
if {detached}:
    sync.detach()
dist.destroy_process_group()
sys.last = Last()
"""
    found = ranks(tmp_path, RANK_0_STOPS + body, 2, "tcp", end=False)
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[1][1] == "the store has answered"


@pytest.mark.ranks
def test_the_rank_that_has_the_store_is_killed_before_the_others_attach(tmp_path: Path) -> None:
    """They know no process of it. What connects to its store goes on trying for as long as a collective may take."""
    body = """
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        told(lambda: stretto.attach(Model()))
        assert time.monotonic() - began < 15, "this waited for the store"
        os._exit(0)
    """
    found = ranks_without_a_model(tmp_path, body, 2, meeting="tcp")
    assert [code for code, _, _ in found] == [-9, 0], found
    assert explained(within(found[1][1], "CommunicationError", 15)) == (
        "rank 1, attach: what ranks hold could not be gathered over process_group (gloo): {2}\n"
        "rank 1 waits in attach() at train.py:LINE in <lambda>; rank 0 does not answer; the process group's store, "
        "which rank 0 has, does not answer.\n"
        "Expected every rank to call stretto.attach. Look at the first error in the other ranks' logs."
    )


@pytest.mark.ranks
def test_a_slow_connection_delays_nothing_but_the_end(tmp_path: Path) -> None:
    """torch looks up the name of the other end when it connects: 5 s and more where DNS does not answer."""
    body = """
        from torch._C._distributed_c10d import PrefixStore
        connect = PrefixStore.clone
        def slow(store):
            time.sleep(5)
            return connect(store)
        PrefixStore.clone = slow
        began = time.monotonic()
        sync = stretto.attach(model, transport=transport)
        step()
        assert time.monotonic() - began < 4.5, "this waited for the connection"
        if rank == 1:
            raise ValueError("the true cause")
        told()
    """
    (code, mine, _), (theirs, _, complaint) = ranks_without_a_model(tmp_path, body, 2, meeting="tcp")
    assert (code, theirs) == (0, 1) and complaint.endswith("ValueError: the true cause\n")
    assert within(mine, "PeerError", 4) == LEFT.format(
        0, 2, "outside backward: ValueError: the true cause (train.py:LINE in <module>)"
    )


@pytest.mark.ranks
def test_an_end_that_waits_for_the_connection_says_so(tmp_path: Path) -> None:
    """30 s at most, without file descriptors say, in which nothing was heard."""
    body = """
        from torch._C._distributed_c10d import PrefixStore
        connect = PrefixStore.clone
        def slow(store):
            time.sleep(3)
            return connect(store)
        PrefixStore.clone = slow
        stretto.line.TELL_SECONDS = 0.2
        sync = stretto.attach(model, transport=transport)
        step()
        sync.detach()
    """
    found = ranks_without_a_model(tmp_path, body, 2, meeting="tcp")
    for rank, (code, _, complaint) in enumerate(found):
        assert code == 0 and complaint.removesuffix("\n") == (
            f"stretto: rank {rank}: nothing is attached any more, but a connection to the process group's store is "
            "still being made. This rank waits for it, 30 s at most: DNS does not answer, or no file descriptors "
            "are left, here or on the host of the store (ulimit -n)."
        )


@pytest.mark.ranks
@pytest.mark.parametrize("late", [0.3, 3.2], ids=["the other soon", "the other late"])
def test_a_model_that_goes_behind_its_process_group_prints_nothing(tmp_path: Path, late: float) -> None:
    """The store goes with it, as at the end of a function that trains, and the other rank may look there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = f"""
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        def train():
            model = Model()
            sync = stretto.attach(model)
            model(torch.ones(1, 3)).backward()
            dist.barrier()
            dist.destroy_process_group()
            time.sleep({late} * rank)
        train()
        time.sleep(1.5)
    """
    found = ranks_without_a_model(tmp_path, body, 2, end=False)
    assert found == [(0, "", "")] * 2


@pytest.mark.timeout(20)
def test_a_handle_may_be_collected_while_notes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of rank 0 stays until the others have left, and reads what they tell, on the same thread."""
    store = dist.HashStore()
    Channel(store, 1, 2).post(Note(1, "ended", leaves=True))
    channel, collected = Channel(store, 0, 2), []

    def collecting(**told: Any) -> Note:
        if not collected:
            collected.append(told)
            channel.read()
        return Note(**told)

    monkeypatch.setattr("stretto.channel.Note", collecting)
    channel.read()
    assert [note.phase for note in channel.notes] == ["ended"] and collected


def test_a_store_that_has_gone_is_called_once() -> None:
    class Broken:
        calls = 0

        def add(self, key: str, number: int) -> int:
            self.calls += 1
            raise dist.DistNetworkError("Broken pipe")

    through = Line(store := Broken())  # type: ignore[arg-type]
    with pytest.raises(dist.DistNetworkError):
        through.add("notes", 1)
    with pytest.raises(RuntimeError, match=r"^the process group's store has gone$"):
        through.add("notes", 1)
    assert store.calls == 1 and through.is_silent


def test_that_a_store_has_gone_shows_without_a_call(capfd: pytest.CaptureFixture[str]) -> None:
    """Which would print a stack from C++."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("b", dist.PrefixStore("a", dist.TCPStore("127.0.0.1", server.port, is_master=False)))
    through = connected(store, Polling())
    clone, number = cloned(store)
    clone.set("key", "value")
    assert number is not None and not is_closed(number) and through.get("key") == b"value" and not through.has_gone
    del server
    until = time.monotonic() + 10
    while not through.has_gone and time.monotonic() < until:
        time.sleep(0.01)
    assert is_closed(number) and through.is_silent
    with pytest.raises(RuntimeError, match=r"^the process group's store has gone$"):
        through.get("key")
    through.lookout.stop()  # type: ignore[union-attr]
    assert through.socket is None and through.has_gone
    assert capfd.readouterr() == ("", "")


def test_of_which_socket_a_store_makes_use_is_not_guessed(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Several:
        port = server.port

        def clone(self) -> Several:
            self.opened = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(2)]
            return self

    store = Several()
    assert cloned(store) == (store, None)
    for one in store.opened:
        one.close()
    assert cloned(dist.FileStore(str(tmp_path / "store"), 1))[1] is None


def pipes() -> list[str]:
    found = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(link for link in (os.readlink(path) for path in found if os.path.exists(path)) if "pipe" in link)


def test_to_look_for_a_socket_touches_no_descriptor() -> None:
    """A copy of a pipe's end would keep who reads the other from seeing that it was closed."""
    socket.setdefaulttimeout(1.0)  # a socket object made around one would no longer block
    try:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends, (one, other) = os.pipe(), socket.socketpair()
        for end in (one, other):
            end.settimeout(None)
        before = pipes()
        clone, number = cloned(server)
        assert clone is not None and number is not None and pipes() == before
        assert os.get_blocking(one.fileno()) and os.get_blocking(other.fileno())
    finally:
        socket.setdefaulttimeout(None)
    for end in ends:
        os.close(end)
    one.close(), other.close()


class Stopped:
    """A store of which calls do not return before ``goes_on`` is set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.written: list[str] = []

    def clone(self) -> Stopped:
        return self

    def set(self, key: str, _: object = None) -> str:
        assert self.goes_on.wait(30)
        self.written.append(key)
        return key

    def check(self, keys: list[str]) -> bool:
        return self.set(keys[0]) in self.written


class Polling:
    """In the place of a channel: no polls, only what is asked for."""

    def watch(self, store: Stopped, is_over: Callable[[], bool]) -> None:
        while not is_over():
            pass


def connected(store: Any, channel: Any) -> Line:
    through = Line(store)
    through.lookout = Lookout(channel, through)
    assert through.lookout._tried.wait(10)
    return through


def test_a_silent_store_is_waited_for_once_and_what_is_to_be_written_is_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "ANSWER_SECONDS", 0.1)
    store = Stopped()
    through = connected(store, Polling())
    word = AwaitedKeys(through, "word", reads=False)
    assert not word.is_completed() and through.is_silent
    monkeypatch.setattr(line, "ANSWER_SECONDS", 60.0)  # nobody waits again
    with pytest.raises(Silent, match=r"^the process group's store does not answer$"):
        through.set("dropped")
    with pytest.raises(Silent):
        through.run(lambda one: one.set("written"), later=True)
    store.goes_on.set()
    until = time.monotonic() + 10
    while through.is_silent and time.monotonic() < until:
        time.sleep(0.01)
    assert through.set("last") == "last" and not through.is_silent and word.is_completed()
    assert store.written == ["word", "written", "last", "word"]
    through.lookout.stop()  # type: ignore[union-attr]
    assert through.set("by itself") == "by itself"


def test_a_word_is_there_when_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may fall silent behind the answer that all have come: that is no reason to give up."""

    class StopsAmid(Stopped):
        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            assert self.goes_on.wait(30)
            return key.encode()

        def delete_key(self, key: str) -> None:
            self.written.append(f"no {key}")

    monkeypatch.setattr(line, "ANSWER_SECONDS", 0.1)
    store = StopsAmid()
    through = connected(store, Polling())
    unread, word = AwaitedKeys(through, "word", reads=False), AwaitedKeys(through, "word")
    assert unread.is_completed() and not word.is_completed() and through.is_silent
    through.put("written", "later")
    assert not word.is_completed() and not store.written
    monkeypatch.setattr(line, "ANSWER_SECONDS", 60.0)
    store.goes_on.set()
    word.wait(timedelta(seconds=30))
    assert word.said() == ["word"] and word.take() == b"word" and word.is_completed()
    assert store.written == ["written", "no word"]
    through.lookout.stop()  # type: ignore[union-attr]


def test_what_is_asked_as_the_store_goes_is_refused() -> None:
    class Gone:
        def watch(self, store: Stopped, is_over: object) -> None:
            assert store.goes_on.wait(10)
            raise dist.DistNetworkError("Broken pipe")

    through = connected(store := Stopped(), Gone())
    lookout = through.lookout
    assert lookout is not None
    threading.Timer(0.2, store.goes_on.set).start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the process group's store has gone$"):
            through.set("key")
    assert through.has_gone and store.written == [], "by nobody, over no connection"
    lookout.stop()
    assert not lookout.is_alive() and through.lookout is None, "nor does one keep the other"


def test_a_thread_that_is_told_to_end_is_alive_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(line, "HANG_UP_SECONDS", 0.1)
    through = connected(store := Stopped(), Polling())
    lookout = through.lookout
    assert lookout is not None
    with pytest.raises(Silent):
        through.set("key")
    lookout.stop(waits=False)
    lookout._is_told_to_end = True  # as soon as it looks
    assert lookout.is_alive() and lookout.is_ending
    store.goes_on.set()
    lookout.join(10)
    assert not lookout.is_alive()


def closed_on_its_own_thread() -> weakref.ref[Channel]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    channel = Channel(dist.TCPStore("127.0.0.1", port, 1, True), 0, 1)
    channel.open(seat := Seat())
    lookout, answers = channel.line.lookout, queue.SimpleQueue[Any]()
    assert lookout is not None and lookout._tried.wait(10)
    lookout.jobs.put(Job(lambda _: channel.close(seat, "dropped"), answers))
    answers.get(timeout=20)
    lookout.join(10)
    return weakref.ref(channel)


def test_a_channel_whose_last_handle_is_collected_on_its_thread_keeps_no_store() -> None:
    """It was kept until the process ended, and the store's port with it."""
    gone = closed_on_its_own_thread()
    gc.collect()
    assert gone() is None


def test_a_thread_that_cannot_be_started_leaves_no_number_of_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection has gone by then: of whatever has that number next, the store would be said to have gone."""
    channel = Channel(dist.TCPStore("127.0.0.1", 0, 1, True), 0, 1)
    connecting = list[threading.Thread]()

    def refuse(lookout: Lookout) -> None:
        connecting.append(lookout._connects)
        if len(connecting) == 1:
            lookout._connects.join(10)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Lookout, "start", refuse)
    for _ in range(2):  # it may have connected before, or only after
        with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
            Lookout(channel, channel.line)
        connecting[-1].join(10)
        assert channel.line.socket is None


def test_a_store_that_lets_nobody_connect_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Stopped):
        def clone(self) -> Stopped:
            assert self.goes_on.wait(30)
            return self

    monkeypatch.setattr(line, "ANSWER_SECONDS", 0.1)
    through = Line(store := Unreachable())  # type: ignore[arg-type]
    through.lookout = lookout = Lookout(Polling(), through)  # type: ignore[arg-type]
    with pytest.raises(Silent):
        through.run(lambda one: one.set("written"), later=True)
    began = time.monotonic()
    lookout.stop(waits=not through.is_silent)
    assert time.monotonic() - began < 10 and store.written == []
    store.goes_on.set()
    lookout.join(10)
    assert store.written == ["written"] and not lookout.is_alive()


def test_an_error_that_came_through_keeps_nothing_of_its_callers() -> None:
    class Refuses(Stopped):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("no")

    class Kept:
        pass

    through = connected(Refuses(), Polling())

    def call(kept: Kept) -> None:
        with pytest.raises(RuntimeError, match=r"^no$"):
            through.check(["key"])

    gone = weakref.ref(kept := Kept())
    gc.collect()
    gc.disable()
    try:
        call(kept)
        del kept
        assert gone() is None
    finally:
        gc.enable()
        through.lookout.stop()  # type: ignore[union-attr]


def test_a_thread_goes_on_after_a_store_that_was_silent_for_longer_than_it_may_be() -> None:
    class Slow(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            if not self.num_keys():
                raise dist.DistStoreError("wait timeout after 4000ms")
            return super().check(keys)

    channel, looks = Channel(store := Slow(), 1, 2), []

    def is_over() -> bool:
        looks.append(len(channel.notes))
        if len(looks) == 2:
            Channel(store, 0, 2).post(Note(0, "ended", leaves=True))
        return len(looks) == 4

    channel.watch(dist.PrefixStore("stretto", store), is_over)
    assert looks[-1] == 1


def test_who_waits_while_the_store_is_silent_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel(dist.HashStore(), 1, 3)

    def silent(*_: object, **__: object) -> None:
        raise Silent("the process group's store does not answer")

    monkeypatch.setattr(Line, "run", silent)
    monkeypatch.setattr(Line, "is_silent", True)
    inquiry = Inquiry(Seat())
    for second in range(40):
        inquiry.go_on("rank 1, attach", channel, [], float(second))
    told = [
        (record.getMessage().partition(" s ")[0], record.getMessage().partition("; ")[2]) for record in caplog.records
    ]
    silent_ones = "rank 0 does not answer; rank 2 does not answer; the process group's store does not answer."
    assert told == [(f"rank 1, attach: rank 1 has waited {second}", silent_ones) for second in (6, 31)]
