"""How programs that share memory end, fork and are stopped. Each rank is a program of its own."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from test_peers import ranks, within

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


def printed(found: list[tuple[int, str, str]]) -> list[str]:
    """What each rank printed, once it is sure that all ended well and silently."""
    for code, _, complaint in found:
        assert (code, complaint) == (0, ""), found
    return [words for _, words, _ in found]


# Forks

FORK = """
    import warnings

    def page():
        return bytes(sync._transport.host.page.mapping)

    step(); right()
    sync.buffers = "none"
    grads = [p.grad.clone() for p in model.parameters()]
    before = page()
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of forks beside threads
    child = os.fork()
    if not child:
        {child}
    _, status = os.waitpid(child, 0)
    assert page() == before, "the child wrote into its parent's page"
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads)), "or into its gradients"
    print("child", os.waitstatus_to_exitcode(status), flush=True)
    step(); right()
    assert sync.describe().startswith(f"rank {{rank}} of {{world}} over shared_memory\\n")
"""
CHILDREN = {  # none ends by sys.exit: Gloo's destructor waits in a forked child for ever, with stretto or without
    "at once": "os._exit(3)",
    "after its exit handlers": "import atexit; atexit._run_exitfuncs(); os._exit(3)",
    "after it has freed all": "import gc; del model, sync, grads; gc.collect(); os._exit(3)",
    "after it has detached": "sync.detach(); model(x).backward(); model(x).backward(); os._exit(3)",
    "after it has trained alone": """
        with sync.no_sync():
            model(x).backward(); model(x).backward()
        os._exit(3)""",
}


@pytest.mark.parametrize("how", CHILDREN)
def test_a_forked_child_ends_and_its_parent_goes_on(tmp_path: Path, how: str) -> None:
    found = ranks(tmp_path, FORK.format(child=CHILDREN[how]))
    assert printed(found) == ["child 3\n"] * 2


def test_a_forked_child_that_calls_backward_is_told(tmp_path: Path) -> None:
    child = """
        for attempt in range(2):
            try:
                model(x).backward()
            except stretto.CommunicationError as error:
                print(error, flush=True)
        try:
            sync.check()
        except stretto.CommunicationError as error:
            print(error, flush=True)
        os._exit(0)
    """
    found = ranks(tmp_path, FORK.format(child=child.strip()))
    for rank, words in enumerate(printed(found)):
        told = (
            f"rank {rank}: this process was forked from process PID, and only that process can reduce.\n"
            "Call detach() in the child before it trains there, or fork before stretto.attach(model)."
        )
        expected = "\n".join([told, told, told, "child 0", ""])
        assert re.sub(r"process \d+", "process PID", words) == expected


def test_workers_of_a_data_loader(tmp_path: Path) -> None:
    body = """
        from torch.utils.data import DataLoader

        data = torch.full((12, 3), 1.0 + rank)
        for epoch in range(2):
            for batch in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
                model.zero_grad()
                model(batch).backward()
                right()
    """
    assert printed(ranks(tmp_path, body)) == ["", ""]


# Ctrl-C

INTERRUPTED = """
    import threading

    def interrupt():
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    began = []
    step()
"""


def test_ctrl_c_on_one_rank(tmp_path: Path) -> None:
    body = (
        INTERRUPTED
        + """
    if rank == 0:
        threading.Timer(0.7, interrupt).start()
        try:
            step()
        except KeyboardInterrupt:
            print(f"KeyboardInterrupt after {time.monotonic() - began[0]:.1f} s: now", flush=True)
            time.sleep(5)  # its program goes on for a while
    else:
        time.sleep(1.5)
        step(); right()  # all that this needs of rank 0 was there
        told()
        assert sync._transport.host.broken == "rank 0 cannot go on: stopped by KeyboardInterrupt"
    """
    )
    first, second = printed(ranks(tmp_path, body))
    assert within(first, "KeyboardInterrupt", 0.5) == "now"
    assert within(second, "PeerError", 2) == (
        "rank 1, pass 3: rank 0 failed and left, so nobody can complete this pass.\n"
        "  rank 0, pass 2, backward: KeyboardInterrupt (train.py:LINE in step)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.parametrize("raised", ["RuntimeError()", "TimeoutError()"])
def test_a_signal_handler_that_raises_on_one_rank(tmp_path: Path, raised: str) -> None:
    """Its error reaches the program as it is, whatever its class and its text."""
    body = f"""
    def handler(*args):
        raise error

    error = {raised}
    step()
    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        try:
            step()
        except type(error) as caught:
            print(caught is error, flush=True)
            time.sleep(2)
    else:
        time.sleep(1.5)
        step()
        told()
        print(sync._transport.host.broken)
    """
    first, second = printed(ranks(tmp_path, body))
    assert first == "True\n"
    assert f"rank 0 cannot go on: stopped by {raised.partition('(')[0]}" in second


@pytest.mark.parametrize("meeting", ["file", "tcp"])
def test_ctrl_c_on_all_ranks_at_once(tmp_path: Path, meeting: str) -> None:
    """One waits for two others, which compute."""
    body = (
        INTERRUPTED
        + """
    threading.Timer(0.7, interrupt).start()
    try:
        if rank:
            time.sleep(10)
        step()
    finally:
        print(f"over after {time.monotonic() - began[0]:.1f} s: ", flush=True)
    """
    )
    for code, words, complaint in ranks(tmp_path, body, 3, meeting):
        assert code == -signal.SIGINT
        assert within(words, "over", 0.5) == ""
        assert complaint.count("Traceback") == 1 and complaint.endswith("KeyboardInterrupt\n"), complaint


# Ends

ENDS = {
    "as it should": "sync.detach()",
    "detached and closed twice": "transport = sync._transport\nsync.detach(); sync.detach()\n"
    "transport.close(); transport.close()",
    "destroyed first": "dist.destroy_process_group()\nsync.detach()\nsys.exit(0)",
    "without a word": "sys.exit(0)",
    "attached again": "for _ in range(3):\n    sync.detach(); sync = stretto.attach(model); step(); right()",
    "dropped": "import gc\ndel model, sync; gc.collect()",
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("meeting", ["file", "tcp"])
def test_programs_end_without_complaint(tmp_path: Path, how: str, meeting: str) -> None:
    body = "step(); right()\n" + ENDS[how]
    assert printed(ranks(tmp_path, body, 2, meeting, end=how in ("as it should", "attached again"))) == ["", ""]


@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_program_ends_well_after_a_backward_that_raised(tmp_path: Path, keep_grads: bool) -> None:
    """What is left of its graph dies with the thread, when there is no interpreter any more: it ended by SIGSEGV."""
    body = f"""
        layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
        handle = stretto.attach(layers)
        stretto.shard(torch.optim.AdamW(layers.parameters()), handle, keep_grads={keep_grads})

        def fails(gradient):
            raise ValueError("mine")

        layers[2].bias.register_hook(fails)
        try:
            layers(torch.randn(4, 6)).sum().backward()
        except ValueError as error:
            print(error, flush=True)
        handle.detach()
        sync.detach()
        dist.destroy_process_group()
    """
    assert printed(ranks(tmp_path, body, end=False)) == ["mine\n"] * 2


def test_a_rank_that_has_done_its_part_ends_long_before_another_reads_it(tmp_path: Path) -> None:
    """A small message is over for a rank when it has summed; its memory is needed until all have."""
    body = """
        if rank == 0:
            time.sleep(2)
        step(); right()
        print("right", flush=True)
    """
    assert printed(ranks(tmp_path, body, 3)) == ["right\n"] * 3


def test_an_exception_ends_a_program_as_ever(tmp_path: Path) -> None:
    found = ranks(tmp_path, "step()\nraise KeyError('mine')", end=False)
    for code, _, complaint in found:
        assert code == 1
        assert complaint.count("Traceback") == 1 and complaint.endswith("KeyError: 'mine'\n"), complaint


def test_a_handle_that_is_kept_keeps_no_file_open(tmp_path: Path) -> None:
    """As in a search that keeps all its models: processes may mostly have 1,024 open files."""
    body = """
        def mine():
            with os.scandir("/proc/self/fd") as opened:
                return sum("memfd:stretto" in os.readlink(one.path) for one in opened)

        def train():
            other = torch.nn.Linear(3, 2)
            handle = stretto.attach(other)
            for _ in range(3):
                other(torch.ones(1, 3)).sum().backward()
            handle.detach()
            other.zero_grad()
            return other, handle

        kept = [train()]
        before = mine()
        kept += [train() for _ in range(4)]
        print(before > 0, mine() - before)
    """
    assert printed(ranks(tmp_path, body)) == ["True 0\n"] * 2
