"""Waiting in slices, with time in between to look why it lasts."""

from __future__ import annotations

import ctypes
import datetime
import functools
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from .errors import CommunicationError
from .transport.base import Transport, Work, raised_by_handler

FIRST_SLICE = datetime.timedelta(seconds=0.5)
SLICE = datetime.timedelta(seconds=1.0)
STORE_SECONDS = 3.0
"""How long ranks wait in the store for each other before they agree on a name."""


class _ThisThread(threading.local):
    waits = False
    """For other ranks, for whatever handle."""


this_thread = _ThisThread()


@functools.cache
def takes_time(kind: type) -> bool:
    """Whether works of this kind can be waited for in slices: a user's own may know nothing but ``wait()``."""
    if not (hasattr(kind, "wait") and hasattr(kind, "is_completed")):
        return False
    try:
        inspect.signature(kind.wait).bind(None, SLICE)
    except ValueError:  # torch's, of C++, which takes one
        return True
    except (TypeError, NameError):  # from Python 3.14 on annotations are looked up: some are for a type checker alone
        return False
    return True


def wait_a_while(word: Work, patience: float, wait: Callable[..., None]) -> None:
    """Wait in the store for all to come; behind that the transport looks: it alone sees a rank die that has told nobody
    who it is.

    Args:
        word: about the ranks that have come.
        patience: seconds that the transport has.
        wait: waits, for so many seconds if they are given.
    """
    if patience <= STORE_SECONDS:
        return wait(word)
    try:
        wait(word, STORE_SECONDS)
    except CommunicationError:
        raise
    except RuntimeError as error:  # nothing is sent as long as the store alone is waited for
        if raised_by_handler(error):
            raise


def gather_by_sums(value: Any, transport: Transport, wait: Callable[[Work], object]) -> list[Any]:
    """The picklable values of all ranks, in two all-reduces on the host. Collective.

    torch gathers objects as well, but waits for them in C++.

    Args:
        value: of this rank.
        transport: carries sizes, then bytes.
        wait: waits for them.
    """
    data = pickle.dumps(value)
    sizes = torch.zeros(transport.world_size, dtype=torch.int64, device="cpu")
    sizes[transport.rank] = len(data)
    wait(transport.all_reduce(sizes))
    ends = sizes.cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    flat = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
    flat[begins[transport.rank] : ends[transport.rank]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    wait(transport.all_reduce(flat))
    # Not string_at, whose size is an int of C: 2 GiB are too many.
    whole = memoryview((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr()))
    return [pickle.loads(whole[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def equal_by_sums(fingerprint: str, transport: Transport, wait: Callable[[Work], object]) -> bool:
    """Whether all ranks bring the same fingerprint, hexadecimal, in one all-reduce on the host. Collective."""
    brought = torch.zeros(transport.world_size, dtype=torch.int64, device="cpu")
    brought[transport.rank] = int(fingerprint[:15], 16)
    wait(transport.all_reduce(brought))
    return bool((brought == brought[0]).all())
