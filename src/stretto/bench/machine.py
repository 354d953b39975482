"""What a figure depends on besides the code, and whether the machine was quiet during the measurement."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..cores import cores

QUIET = 0.1
"""If others use a larger share of the cores than this, figures are called doubtful."""


@dataclass(frozen=True)
class Machine:
    """Where and when."""

    cpu: str
    cores: int
    """That this process may use."""
    system: str
    python: str
    torch: str
    stretto: str
    load: float | None
    """Load average of the last minute, earlier measurements included; None if not available."""
    busy: float | None
    """The share of all cores that others used right before, 0 to 1; None if the system does not tell."""
    when: str
    """UTC."""

    @property
    def quiet(self) -> bool:
        """Whether others left the machine alone when measuring began, as far as is known."""
        return self.busy is None or self.busy < QUIET

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        known = [] if self.load is None else [f"load {self.load:.2f}"]
        if self.busy is None:
            known.append("whether it was quiet is not known")
        else:
            state = "quiet" if self.quiet else "NOT QUIET: figures are doubtful"
            known.append(f"others used {100 * self.busy:.0f} % of the cores at the start ({state})")
        return (
            f"{self.cpu}, {self.cores} cores, {self.system}, Python {self.python}, torch {self.torch}, stretto "
            f"{self.stretto}; {self.when} UTC; {', '.join(known)}"
        )


def this_machine(watch_seconds: float = 0.5) -> Machine:
    """The machine now. Watches for ``watch_seconds`` how busy others keep it; call it while this program is idle."""
    before = _ticks()
    time.sleep(watch_seconds)
    idle, total = (now - then for now, then in zip(_ticks(), before, strict=True))
    return Machine(
        cpu=_cpu(),
        cores=cores(),
        system=f"{platform.system()} {platform.release().partition('-')[0]}",  # the rest names a build
        **versions(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        busy=1 - idle / total if total else None,
        when=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    )


def versions() -> dict[str, str]:
    """The versions that all figures depend on, by name."""
    return {"stretto": version("stretto"), "torch": torch.__version__, "python": platform.python_version()}


def _ticks() -> tuple[int, int]:
    """Ticks of all cores since boot: idle ones, and all; zeros if they are not counted, as on macOS."""
    with contextlib.suppress(OSError):
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)
    return 0, 0


def _cpu() -> str:
    names = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
