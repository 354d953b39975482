"""How much memory this machine, and the control groups of this process, have left; who was killed for lack of it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_bytes() -> int | None:
    """What the system, and the control group of this process, have left; None where that cannot be read."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for limit, used, reclaimable in control_groups():
        with contextlib.suppress(OSError, ValueError):
            cached = [
                int(line.split()[1])
                for line in reclaimable.read_text().splitlines()
                if line.startswith(("inactive_file ", "total_inactive_file "))
            ]
            found.append(int(limit.read_text()) - int(used.read_text()) + max(cached, default=0))
    return min(found, default=None)


def control_groups() -> list[tuple[Path, Path, Path]]:
    """Files with the limit, the use and the statistics of memory, of version 2 and of version 1, of all that hold us.

    In a container the path may be that of the host; then only the outermost is there.
    """
    groups = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, limit, used = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
            if not controllers:
                root, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
            elif "memory" not in controllers.split(","):
                continue
            group = root / path.lstrip("/")
            for one in (group, *[parent for parent in group.parents if parent.is_relative_to(root)]):
                groups.append((one / limit, one / used, one / "memory.stat"))
    return groups


def kills_for_want_of_memory() -> int:
    """How many processes of this machine, in whatever container, the kernel has killed so; 0 if that is hidden."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
