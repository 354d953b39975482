"""The drop-in among ranks that run out of batches early: torch's ``Join``.

a rank that has batches  ──> before the forward of each pass: an all-reduce of 1, by which the joined learn of it
one that has none        ──> answers, and takes part in that pass with nothing to give
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .errors import PeerError


def tell_joined(ddp: Any) -> bool:
    """Tell the ranks that have joined that a pass comes. Collective.

    Once for each pass: forward may fail before it, and be followed by that of another batch, or run twice.

    Returns:
        False if it was told before.
    """
    now = ddp.synchronizer.backwards[0]
    if ddp.__dict__.get("_join_told") == now:
        return False
    Join.notify_join_context(ddp)
    ddp.__dict__["_join_told"] = now
    return True


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

    def main_hook(self) -> None:
        """One pass of the others. Where it failed, and they go on, there is nothing here to be undone."""
        self.ddp.synchronizer.buffers = "none"
        self.ddp._check_and_sync_module_buffers()
        try:
            self.ddp._match_all_reduce_for_bwd_pass()
        except PeerError as error:
            if not error.can_go_on:
                raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined."""
        self.ddp._sync_final_model(is_last_joiner)
        Joinable.__init__(self.ddp)  # outside of join() forward shall not communicate
        self.left()
