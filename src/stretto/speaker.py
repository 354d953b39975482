"""In a program that has set up no logging, warnings begin with this library's name.

Python then prints bare messages, and a line that begins with "rank 0, pass 9:" would leave open, among all that the
ranks print, where it comes from.
"""

from __future__ import annotations

import logging

log = logging.getLogger("stretto")


def name_the_speaker() -> None:
    """Once in a process, and harmless again. A filter, and no handler: programs ask whether there is one."""
    log.addFilter(_named)


def _named(record: logging.LogRecord) -> bool:
    if not log.hasHandlers():  # so only Python's last resort prints it
        record.msg = f"stretto: {record.msg}"
    return True
