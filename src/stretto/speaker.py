"""Who speaks: warnings in a program that has set up no logging begin with this library's name.

Python prints bare messages then, and a line that begins with "rank 0, pass 9:" leaves open whose it is, among all that
ranks print.
"""

from __future__ import annotations

import copy
import logging

log = logging.getLogger("stretto")


class Speaker(logging.Handler):
    """Has Python's last resort print what nobody else handles, with the name before it."""

    def emit(self, record: logging.LogRecord) -> None:
        """As logging asks for."""
        every, last = (*logging.getLogger().handlers, *log.handlers), logging.lastResort
        others = [one for one in every if not isinstance(one, Speaker)]
        if not others and last is not None and record.levelno >= last.level:
            named = copy.copy(record)
            named.msg, named.args = f"stretto: {record.getMessage()}", ()
            last.handle(named)


def name_the_speaker() -> None:
    """Once in a process, and harmless again. Changes nothing where the program handles what is logged."""
    if not log.handlers:
        log.addHandler(Speaker())
