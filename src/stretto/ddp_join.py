"""The drop-in among ranks that run out of batches early: torch's ``Join``.

a rank that has batches  ──> as a pass begins: an all-reduce of 1, by which those that have run out learn of it
one that has run out     ──> answers, and takes part in that pass with nothing to give

[Note: in forward]  torch announces a pass in forward, which therefore communicates. Here only two things need that: a
buffer hook, in which all ranks take part, and ``throw_on_early_termination``, since forward itself may contain a
collective (SyncBN) that would wait for ranks that are gone.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from .errors import CommunicationError, PeerError, StrettoError
from .sharding import refuse_half_joined
from .uneven import Uneven


def announces_in_forward(ddp: Any) -> bool:
    """See [Note: in forward]."""
    config = ddp._join_config
    return bool(config.enable and (config.throw_on_early_termination or "buffer_hook" in ddp.__dict__))


def announce_in_forward(ddp: Any) -> bool:
    """Once for each pass: forward may fail before it, and be followed by that of another batch, or run twice.

    Collective. Returns False if it was announced before.
    """
    now = ddp.synchronizer.backwards[0]
    if ddp.__dict__.get("_join_told") == now:
        return False
    _tell(ddp)
    ddp.__dict__["_join_told"] = now
    return True


def _end(ddp: Any, *, afresh: bool = False) -> None:
    """Outside of ``Join`` no pass is announced. ``Joinable``'s constructor would go on to those of the program."""
    ddp._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
    ddp.__dict__.pop("_join_uneven", None)
    ddp.synchronizer.join(None, afresh=afresh)
    for one in ddp.synchronizer.sharded:
        one.leave()


def _leave(reference: weakref.ref[Any]) -> None:
    """An exception has left ``Join`` on all ranks."""
    if (ddp := reference()) is not None:
        _end(ddp)


def _announce(reference: weakref.ref[Any]) -> bool:
    """A pass begins. Returns False if none is to be announced any more."""
    if (ddp := reference()) is None:
        return False
    if not ddp._join_config.enable:
        _end(ddp)
        return False
    if not announces_in_forward(ddp):
        _tell(ddp)
        return True
    try:
        announce_in_forward(ddp)  # for methods other than the wrapper's, nothing has been told
    except RuntimeError as error:  # it is to throw: nothing of the pass has been sent
        raise error if isinstance(error, StrettoError) else CommunicationError(str(error)) from None
    return True


def _tell(ddp: Any) -> None:
    if not ddp._join_config.throw_on_early_termination:  # there no rank is ever without batches
        refuse_half_joined(ddp.synchronizer.sharded, f"rank {ddp.synchronizer.rank}")
    # Nobody waits for it, and Gloo's thread is not to be the last that holds it: transport/letting_go.py. The last few,
    # since the thread may not be through with one when the next is sent.
    ddp.__dict__.setdefault("_join_words", collections.deque(maxlen=4)).append(Join.notify_join_context(ddp))


class ShadowHook(JoinHook):
    """What a rank without batches does.

    Args:
        ddp: the drop-in.
        left: called when all have joined, and have the same model again.
    """

    def __init__(self, ddp: Any, left: Callable[[], None]) -> None:
        self.ddp = ddp
        self.left = left
        ddp.__dict__.pop("_join_told", None)
        me, of = weakref.ref(self), weakref.ref(ddp)
        self._uneven = Uneven(
            tell=functools.partial(_announce, of), has_left=lambda: me() is None, end=functools.partial(_leave, of)
        )
        self._enter()

    def _enter(self) -> None:
        self.ddp.__dict__["_join_uneven"] = self._uneven  # should it be attached anew
        self.ddp.synchronizer.join(self._uneven)

    def main_hook(self) -> None:
        """One pass of the others. Where it failed, and they go on, there is nothing here to be undone."""
        self._uneven.has_batches = False
        self._enter()  # there may be that of another Join, made since
        try:
            if "buffer_hook" in self.ddp.__dict__:
                self.ddp._check_and_sync_module_buffers()
            self.ddp._match_all_reduce_for_bwd_pass()
        except PeerError as error:
            if not error.can_go_on:
                _end(self.ddp)
                raise
        except BaseException:  # it leaves Join
            _end(self.ddp)
            raise
        finally:
            self._uneven.has_batches = True  # an optimizer's hook may leave Join after this

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined."""
        self.ddp._sync_final_model(is_last_joiner)
        _end(self.ddp, afresh=True)
        self.left()
