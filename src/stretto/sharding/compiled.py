"""Whether torch's compiler is at work: it guards on parameters' classes, and traces what a tensor class does.

So no parameter may be awaited when it begins, or after that: each step would make it compile again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

_PENDING = "_CompilationCallbackHandler__pending_callbacks_counter"
log = logging.getLogger("stretto")


class CompilerWatch:
    """Whether anything has been compiled in this process since this was made."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self._handler = callback_handler
        self._was_at_work = False
        self._begins: weakref.WeakMethod[Callable[[], None]] | None = None
        watch = weakref.ref(self)

        def start(_: Any) -> None:
            if (alive := watch()) is not None:
                alive._start()

        callback_handler.register_start_callback(start)
        weakref.finalize(self, _forget, callback_handler, start).atexit = False

    @property
    def is_at_work(self) -> bool:
        """Whether a compilation has begun, or is under way in any thread, in which case the next one calls nobody.

        torch calls back when the first of concurrent compilations begins. After one that failed to end, none counts as
        the first again.
        """
        return self._was_at_work or getattr(self._handler, _PENDING, 0) > 0

    def call(self, begins: Callable[[], None]) -> None:
        """From now on call this bound method, held weakly, before anything is compiled."""
        self._begins = weakref.WeakMethod(begins)

    def _start(self) -> None:
        if not self._was_at_work:
            self._was_at_work = True
            log.info("torch.compile is in use: what ranks have stepped is waited for in step(), not in forward.")
        act = self._begins and self._begins()
        if act:
            act()


def _forget(handler: Any, start: Callable[[Any], None]) -> None:
    handler.start_callbacks = [one for one in handler.start_callbacks if one is not start]  # torch may be amid them
