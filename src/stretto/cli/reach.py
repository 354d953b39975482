"""Tries by which address Gloo and the store would leave this host."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from .machine import Interface, is_loopback

PATIENCE = 2.0
"""Seconds for one connection to this host itself."""


@dataclass(frozen=True)
class GlooInterface:
    """What Gloo listens on."""

    by: str
    """``GLOO_SOCKET_IFNAME``, ``hostname``, or why neither works."""
    interface: str | None
    address: str | None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.interface or 'no interface'} ({self.address or 'no address'}), by {self.by}"


@dataclass(frozen=True)
class Reached:
    """An attempt to reach a store on this host."""

    through: str
    """An interface, or ``hostname``."""
    address: str
    problem: str = ""
    """Empty if it was reached."""


def what_gloo_chooses(hostname: str, interfaces: Sequence[Interface]) -> GlooInterface:
    """Choose as torch does: the interface that is named, else the one with the host name's address, else loopback."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        names = named.split(",")
        problem = next(filter(None, map(_why_no_device, names)), "")
        found = next((one for one in interfaces if one.name == names[0]), None)
        address = found.addresses[0] if found is not None and found.addresses else None
        return GlooInterface("GLOO_SOCKET_IFNAME", named, address, problem)
    address = next((one for one in addresses_of(hostname) if _can_bind(one)), None)
    by = "hostname" if address else "nothing: the host name has no address of this host"
    address = address or "127.0.0.1"
    name = next((one.name for one in interfaces if address in one.addresses), None)
    if name is None and is_loopback(address):  # 127.0.1.1 is on no interface, but reaches loopback
        name = next((one.name for one in interfaces if one.is_loopback), None)
    return GlooInterface(by, name, address, _why_no_device(None))


def _why_no_device(interface: str | None) -> str:
    try:
        gloo = dist.ProcessGroupGloo
        _ = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
    except (RuntimeError, ValueError) as error:
        return re.sub(r"^.*\] (\S+ [!=]= \S+ )?", "", str(error).splitlines()[0])  # cut off C++'s location
    return ""


def addresses_of(hostname: str) -> list[str]:
    """What it resolves to, in order."""
    with contextlib.suppress(OSError):
        return [*dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM))]
    return []


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def reach_the_store(hostname: str, interfaces: Sequence[Interface]) -> list[Reached]:
    """Start a store here, and connect to it through each address of this host."""
    ways = [(one.name, address) for one in interfaces if one.up for address in one.addresses]
    ways += [("hostname", hostname)]
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        return [
            Reached(name, address, f"a store cannot be started here: {_first_line(error)}") for name, address in ways
        ]
    return [Reached(name, address, _why_not_reached(address, store.port)) for name, address in ways]


def _why_not_reached(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), PATIENCE).close()  # the store's client would print much
    except OSError as error:
        return error.strerror or str(error)
    try:
        patience = timedelta(seconds=PATIENCE)
        client = TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
        client.set(f"stretto/doctor/{address}", "here")
    except RuntimeError as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
