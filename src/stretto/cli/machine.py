"""What this machine and this Python are: versions, backends, cores, memory, network interfaces."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..bench.machine import versions
from ..cores import cores
from ..system_memory import available_bytes, control_groups

if sys.platform != "win32":
    import fcntl
    import resource

_UNLIMITED = 2**60  # version 1 of control groups reports the largest possible number of pages
_GET_FLAGS, _GET_ADDRESS, _UP = 0x8913, 0x8915, 1


@dataclass(frozen=True)
class Interface:
    """Of the network."""

    name: str
    addresses: tuple[str, ...]
    up: bool

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this host alone."""
        return bool(self.addresses) and all(is_loopback(one) for one in self.addresses)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}{'' if self.up else ', down'})"


@dataclass(frozen=True)
class LocalMachine:
    """The machine, as far as it matters for training on several ranks."""

    versions: dict[str, str]
    backends: dict[str, bool]
    """torch.distributed's backends, and whether this torch has them."""
    accelerators: tuple[str, ...]
    cores: int
    """That this process may use."""
    all_cores: int
    threads: int
    """That torch would use."""
    omp_num_threads: str | None
    available_memory: int | None
    memory_limit: int | None
    """The limit of the control groups; None if there is none."""
    open_files: int | None
    """How many a process may have open; None if there is no limit."""
    hostname: str
    interfaces: tuple[Interface, ...]


def look_at_machine() -> LocalMachine:
    """Now."""
    there = dist.is_available()
    backends = {
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
        "mpi": there and dist.is_mpi_available(),
    }
    cuda = torch.cuda.is_available()
    return LocalMachine(
        versions=versions() | {"system": _system(), "kernel": platform.release(), "machine": platform.machine()},
        backends=backends,
        accelerators=tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())) if cuda else (),
        cores=cores(),
        all_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        available_memory=available_bytes(),
        memory_limit=_memory_limit(),
        open_files=most_open_files(),
        hostname=socket.gethostname(),
        interfaces=look_at_interfaces(),
    )


def most_open_files() -> int | None:
    """See :attr:`LocalMachine.open_files`."""
    if sys.platform == "win32":
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _memory_limit() -> int | None:
    found = []
    for limit, _, _ in control_groups():
        with contextlib.suppress(OSError, ValueError):
            found.append(int(limit.read_text()))
    return min((one for one in found if one < _UNLIMITED), default=None)


def _system() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return platform.system()


def look_at_interfaces() -> tuple[Interface, ...]:
    """All interfaces of this network namespace, in the kernel's order; none on Windows, which needs another call."""
    if sys.platform == "win32":
        return ()
    ipv6 = _ipv6_addresses()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            addresses, flags = [], 0
            with contextlib.suppress(OSError):
                flags = struct.unpack("H", fcntl.ioctl(any_socket, _GET_FLAGS, request)[16:18])[0]
                addresses.append(socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24]))
            found.append(Interface(name, (*addresses, *ipv6.get(name, ())), bool(flags & _UP)))
    return tuple(found)


def _ipv6_addresses() -> dict[str, list[str]]:
    """Addresses by interface. Link-local ones are left out: they need the interface's number."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            if not address.startswith("fe80"):
                found.setdefault(name, []).append(address)
    return found


def is_loopback(address: str) -> bool:
    """Whether it leads to this host alone."""
    return address.startswith("127.") or address == "::1"
