"""Two hosts with a network between them: what leaves a host, and what happens when a rank of another host dies."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm_hosts

import stretto
from stretto.line import POLL_SECONDS
from stretto.testing_network import INTERFACE, EmulatedHosts, sent_bytes
from stretto.trace import read_trace

pytestmark = [pytest.mark.network, pytest.mark.slow]
STEPS = 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedHosts]:
    try:
        emulated = EmulatedHosts()
    except OSError as error:
        pytest.skip(f"{error}")
    with emulated:
        yield emulated


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 300))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    return (model(data) - data).square().mean()


def train(rank: int, transport: str) -> tuple[str, float, list[torch.Tensor]]:
    """Returns the transport's name, bytes that left this host per byte of gradients, and all gradients."""
    model = small_model()
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.5)  # type: ignore[arg-type]
    gradients = []
    loss(model, batch(rank, 0)).backward()  # the order of buckets is learnt in the first pass
    dist.barrier()
    before = sent_bytes()
    dist.barrier()  # nobody sends before all have read
    for step in range(STEPS):
        model.zero_grad()
        loss(model, batch(rank, step)).backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    dist.barrier()
    sent = sent_bytes() - before
    name = sync.describe().splitlines()[0]
    sync.detach()
    return name, sent / sum(gradient.nbytes for gradient in gradients), gradients


@pytest.mark.parametrize("sizes, flat, apart", [([2, 2], 3 / 2, 1), ([3, 3], 5 / 3, 1)])
def test_one_share_of_the_gradients_leaves_a_host(
    hosts: EmulatedHosts, sizes: list[int], flat: float, apart: float
) -> None:
    """A flat ring of P ranks sends 2 (P - 1) / P of them over each link between hosts, ours one of two hosts."""
    world = sum(sizes)
    ours, group = hosts.spawn_ranks(train, sizes, "auto"), hosts.spawn_ranks(train, sizes, "process_group")
    for rank in range(world):
        assert ours[rank][0] == f"rank {rank} of {world} over hierarchical ({world} ranks on 2 hosts)"
        assert group[rank][0] == f"rank {rank} of {world} over process_group (gloo)"
        assert apart < ours[rank][1] < 1.06 * apart, "with headers, barriers and acknowledgements"
        assert flat < group[rank][1] < 1.06 * flat
        assert ours[rank][1] / group[rank][1] < 1.04 * apart / flat
        assert all(torch.equal(*pair) for pair in zip(ours[rank][2], ours[0][2], strict=True))

    model, gradients = small_model(), []
    for step in range(STEPS):
        model.zero_grad()
        loss(model, torch.cat([batch(rank, step) for rank in range(world)])).backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    torch.testing.assert_close(ours[0][2], gradients)


def train_in_shares(rank: int, overlap: bool) -> tuple[str, float, dict[str, torch.Tensor]]:
    """Returns what is done, bytes that left this host in a step per byte of the model, and the model."""
    model = small_model()
    sync = stretto.attach(model, bucket_cap_mb=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharded = stretto.shard(sgd, sync, keep_grads=False, overlap=overlap)

    def step(number: int) -> None:
        sharded.zero_grad()
        loss(model, batch(rank, number)).backward()
        sharded.step()

    for number in range(2):  # the order of buckets is learnt
        step(number)
    model.state_dict()
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    for number in range(STEPS):
        step(number)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    dist.barrier()
    sent = sent_bytes() - before
    told = sync.describe()
    sync.detach()
    return told, sent / (STEPS * sum(value.nbytes for value in after.values())), after


@pytest.mark.parametrize("overlap", [True, False])
def test_half_of_the_gradients_and_half_of_the_model_leave_a_host(hosts: EmulatedHosts, overlap: bool) -> None:
    """Each of two hosts needs of the other what that has of its share, and what that has stepped."""
    found = hosts.spawn_ranks(train_in_shares, [2, 2], overlap)
    when = "while the next forward runs" if overlap else "before step() returns"
    for told, sent, model in found:
        assert f"come from other hosts {when}; gradients arrive in shares" in told
        assert 1 < sent < 1.06, "with headers, barriers, meetings and acknowledgements"
        assert all(torch.equal(value, found[0][2][name]) for name, value in model.items())

    model = small_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in (*range(2), *range(STEPS)):
        plain.zero_grad()
        loss(model, torch.cat([batch(rank, number) for rank in range(4)])).backward()
        plain.step()
    torch.testing.assert_close(found[0][2], dict(model.state_dict()))


# Life and death


def die_in_a_pass(rank: int, victim: int, folder: str) -> None:
    model = small_model()
    sync = stretto.attach(model)
    for step in range(100):
        if rank == victim and step == 3:
            Path(folder, "died").write_text(f"{time.time()} {os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss(model, batch(rank, step)).backward()
        except stretto.StrettoError as error:
            Path(folder, f"told{rank}").write_text(f"{time.time()} {type(error).__name__}: {error}")
            raise
    sync.detach()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_of_another_host_that_was_killed_is_named_within_seconds(
    hosts: EmulatedHosts, tmp_path: Path, victim: int
) -> None:
    with pytest.raises(RuntimeError):
        hosts.spawn_ranks(die_in_a_pass, [2, 2], victim, str(tmp_path), timeout=60)
    died, pid = (tmp_path / "died").read_text().split()
    for rank in {0, 1, 2, 3} - {victim}:
        when, _, text = (tmp_path / f"told{rank}").read_text().partition(" ")
        assert float(when) - float(died) < 10, text
        assert text.startswith(f"PeerError: rank {rank}, pass 4: "), text
        assert f"rank {victim} (pid {pid})" in text, text


def test_a_rank_that_was_killed_alone_on_its_host_is_named(hosts: EmulatedHosts, tmp_path: Path) -> None:
    """Nobody of the others can see that its process has ended."""
    with pytest.raises(RuntimeError):
        hosts.spawn_ranks(die_in_a_pass, [2, 1], 2, str(tmp_path), timeout=60)
    texts = [(tmp_path / f"told{rank}").read_text().partition(" ")[2] for rank in range(2)]
    begins, which, why = texts[0].partition("the exchange with rank 2 of another host has failed: ")
    assert begins.startswith("CommunicationError: rank 0, pass 4: bucket 0 (") and which, texts[0]
    assert begins.endswith(") could not be reduced over hierarchical (3 ranks on 2 hosts): ")
    assert why.endswith("\nLook at the first error in the other ranks' logs, and start again, on all ranks.")
    assert f"rank 0 cannot go on: {which}{why.splitlines()[0]}" in texts[1] or texts[0].partition(": ")[2] in texts[1]


def die_in_attach(second: bool, rank: int, folder: str) -> None:
    """A rank that lives on takes its time to end, as programs do that save what they have."""

    def die(*_: object) -> None:
        Path(folder, "pid").write_text(f"{os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)

    if second:
        actor = small_model()
        stretto.attach(actor)
    if rank == 3:
        stretto.peers.gather_by_sums = die  # type: ignore[assignment]
    try:
        stretto.attach(small_model())
    except stretto.StrettoError as error:
        Path(folder, f"told{rank}").write_text(f"{type(error).__name__}: {error}")
        time.sleep(4)
        raise


@pytest.mark.parametrize("second", [False, True])
def test_a_rank_of_another_host_that_was_killed_in_attach_is_named(
    hosts: EmulatedHosts, tmp_path: Path, second: bool
) -> None:
    """The rank beside it sees that, and says so though its own handle has no name yet."""
    with pytest.raises(RuntimeError):
        hosts.spawn_ranks(functools.partial(die_in_attach, second), [2, 2], str(tmp_path), timeout=60)
    pid = (tmp_path / "pid").read_text()
    for rank in range(3):
        text = (tmp_path / f"told{rank}").read_text()
        assert text.startswith(f"PeerError: rank {rank}, attach: rank "), text
        assert f"rank 3 (pid {pid}) died without a word" in text, text


def end_without_a_word(rank: int, how: str, in_shares: bool) -> None:
    """Ends as programs do that neither detach nor destroy anything; with shares of the last step under way."""
    model = small_model()
    sync = stretto.attach(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if in_shares:
        optimizer = stretto.shard(optimizer, sync)
    for step in range(3):
        loss(model, batch(rank, step)).backward()
        optimizer.step()
    if how == "destroy first":
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif how == "detach":
        sync.detach()
    else:
        globals()["kept"] = model, sync, optimizer


@pytest.mark.parametrize("in_shares", [False, True])
@pytest.mark.parametrize("how", ["nothing", "detach", "destroy first"])
def test_programs_end_without_a_sound(
    hosts: EmulatedHosts, how: str, in_shares: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts.spawn_ranks(end_without_a_word, [2, 2] if in_shares else [2, 1], how, in_shares)
    assert capfd.readouterr() == ("", "")


def end_after_the_store(rank: int) -> None:
    """Rank 0, which has the store as in real programs, is through long before the other."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="tcp://10.0.0.1:29401", rank=rank, world_size=2)
    sync = stretto.attach(model := small_model())
    loss(model, batch(rank, 0)).backward()
    until = time.monotonic() + 30
    while rank == 1 and somebody_listens("10.0.0.1", 29401):
        assert time.monotonic() < until
        time.sleep(0.05)
    if rank == 1:
        time.sleep(1.5 * POLL_SECONDS)  # in which the thread looks again
    sync.detach()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def somebody_listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), 5):
            return True
    except ConnectionRefusedError:
        return False


def test_a_rank_that_ends_after_the_store_of_another_host_has_gone_says_nothing(
    hosts: EmulatedHosts, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts.spawn_ranks(end_after_the_store, [1, 1])
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if "hostname of the client socket" not in line] == []  # torch's, of hosts without DNS


# The cable is cut


def set_cable(how: str) -> None:
    """On this rank's host."""
    subprocess.run(["ip", "link", "set", INTERFACE, how], check=True)


def end_a_trace_on_a_cut_cable(rank: int, folder: str) -> float:
    """Returns how long the end took. The store is that of real programs: rank 0 has it, behind the cable."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="tcp://10.0.0.1:29400", rank=rank, world_size=2)
    stretto.clocks.identity = lambda: f"kernel {rank}"
    sync = stretto.attach(model := small_model())
    with sync.trace(folder):
        loss(model, batch(rank, 0)).backward()
        dist.barrier()
        if rank == 1:
            set_cable("down")
        began = time.monotonic()
    took = time.monotonic() - began
    if rank == 1:
        set_cable("up")
    return took


def test_nobody_stays_at_the_end_of_a_trace_where_the_cable_is_cut(hosts: EmulatedHosts, tmp_path: Path) -> None:
    """There clocks are compared once more, for some seconds."""
    assert max(hosts.spawn_ranks(end_a_trace_on_a_cut_cable, [1, 1], str(tmp_path), timeout=50)) < 15
    first, second = read_trace(tmp_path)
    assert first.end == second.end == "closed"
    assert second.clock is not None and second.later is None


# The hosts themselves


def test_the_cable_can_be_slowed_down(hosts: EmulatedHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("tc") is not None:
        with EmulatedHosts() as others:
            others.limit("1gbit")
            for host in range(2):
                command = others.command(host, "tc", "qdisc", "show", "dev", "stretto0")
                told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert "tbf" in told and "rate 1Gbit" in told and "lat 50ms" in told
            with pytest.raises(OSError, match=r"emulated host 0: tc qdisc .*: .*very fast"):
                others.limit("very fast")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError) as caught:
        hosts.limit("1gbit")
    assert str(caught.value) == "the cable cannot be slowed down: tc is not installed"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError) as caught:
        EmulatedHosts()
    assert str(caught.value) == "hosts cannot be emulated: ip, unshare, nsenter is not installed"


def test_what_is_not_permitted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("ip", "unshare", "nsenter"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'Operation not permitted' >&2; exit 1\n")
        (tmp_path / tool).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OSError) as caught:
        EmulatedHosts()
    assert str(caught.value) == "hosts cannot be emulated: Operation not permitted"


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("it does not work")


def say_hello(rank: int, word: str) -> str:
    return f"{word} {rank}"


def sleep(rank: int) -> None:
    time.sleep(1000)


def test_failures_and_late_ranks_are_told(hosts: EmulatedHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks that are started as users' are."""
    monkeypatch.setattr(EmulatedHosts, "_start_rank", warm_hosts.start_cold)
    assert hosts.spawn_ranks(say_hello, [1, 1], "hello") == ["hello 0", "hello 1"]
    with pytest.raises(RuntimeError, match="it does not work"):
        hosts.spawn_ranks(fail, [1, 1])
    with pytest.raises(TimeoutError) as caught:
        hosts.spawn_ranks(sleep, [1, 1], timeout=0.1)
    assert str(caught.value) == "ranks [0, 1] did not end within 0 s"


BUILD = """
import subprocess, time
from stretto.testing_network import EmulatedHosts
hosts = EmulatedHosts()
sleepers = [subprocess.Popen(hosts.command(host, "sleep", "987654")) for host in range(2)]
print("built", flush=True)
time.sleep(1000)
"""


def sleepers() -> list[str]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x00987654" in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_hosts_end_with_the_program_however_it_ends(hosts: EmulatedHosts) -> None:
    program = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == b"built\n"
    while len(sleepers()) < 2:
        time.sleep(0.05)
    program.kill()
    program.wait()
    program.stdout.close()
    until = time.monotonic() + 20
    while sleepers() and time.monotonic() < until:
        time.sleep(0.05)
    assert not sleepers()
