"""Whether torch's compiler is at work: it knows parameters by their class, and traces what a class of tensors does.

So none may be awaited when it begins, and none from then on: each step would have it compile again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger("stretto")


class CompilerWatch:
    """Calls ``begins`` whenever something is to be compiled in this process.

    Args:
        begins: a bound method, whose object is not kept alive.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        from torch._dynamo.callback import callback_handler

        self.is_at_work = False
        method, watch = weakref.WeakMethod(begins), weakref.ref(self)

        def start(_: Any) -> None:
            alive, act = watch(), method()
            if alive is not None and not alive.is_at_work:
                alive.is_at_work = True
                log.info("torch.compile is in use: what ranks have stepped is waited for in step(), not in forward.")
            if act is not None:
                act()

        callback_handler.register_start_callback(start)
        self._end = weakref.finalize(self, _forget, callback_handler, start)
        self._end.atexit = False


def _forget(handler: Any, start: Callable[[Any], None]) -> None:
    if start in handler.start_callbacks:
        handler.remove_start_callback(start)
