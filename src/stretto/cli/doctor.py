"""``stretto doctor``: what this machine has, what works, and what to change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from ..report import ms
from ..terminal import progress
from ..wording import columns, counted, format_bytes
from .console import FINE, WRONG, AsJson, CommandError, say, say_json
from .launched import Launched, is_launched, look_together
from .machine import Interface, LocalMachine, is_loopback, look_at_machine
from .reach import GlooInterface, Reached, reach_the_store, what_gloo_chooses
from .speed import Speed, measure

LITTLE_MEMORY = 512 * 1024**2
_HEADS = ("quarter to quarter", "per second")


@dataclass(frozen=True)
class Findings:
    """All that was looked at."""

    machine: LocalMachine
    gloo: GlooInterface
    reached: tuple[Reached, ...]
    speed: Speed | None
    speed_problem: str = ""
    """Why nothing was measured."""
    launched: Launched | None = None
    """What the ranks that a launcher has started found out together."""


def doctor(
    interface: Annotated[
        str | None, typer.Option(help="Look only at this network interface, and measure over it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure only a few rounds.")] = False,
    as_json: AsJson = False,
) -> int:
    """Look at this machine: versions, network, shared memory, speed.

    Also threads, and how fast two ranks exchange gradients. The exit code is 1 if something is broken. The last lines
    say what can be improved. Started by torchrun on all hosts of a job (torchrun ... -m stretto doctor), it measures
    between all its ranks; rank 0 prints the result, other ranks only what is broken there.
    """
    findings = examine(interface, quick=quick)
    broken, advice = faults(findings), advise(findings)
    if findings.launched is not None and findings.launched.rank > 0 and not broken:
        return FINE
    if as_json:
        speed = asdict(findings.speed) if findings.speed else None
        network = {"gloo": asdict(findings.gloo), "store": [asdict(one) for one in findings.reached]}
        ranks = asdict(findings.launched) if findings.launched else None
        told = {"broken": broken, "advice": advice, "speed": speed, "launched": ranks}
        say_json({"machine": asdict(findings.machine), "network": network, **told})
    else:
        verdict = [*(f"BROKEN: {one}" for one in broken), *advice] or ["Nothing to change."]
        parts = (_machine(findings.machine), _network(findings), _speed(findings), verdict)
        say("\n\n".join("\n".join(part) for part in parts if part))
    return WRONG if broken else FINE


def examine(interface: str | None, *, quick: bool) -> Findings:
    """Look and measure.

    Raises:
        CommandError: there is no such interface.
    """
    with progress("looking"):
        machine = look_at_machine()
        looked_at = _chosen(interface, machine.interfaces)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # for what follows, the ranks that are started included
        gloo = what_gloo_chooses(machine.hostname, machine.interfaces)
        reached = tuple(reach_the_store(machine.hostname, looked_at))
    if gloo.problem:
        return Findings(machine, gloo, reached, None, gloo.problem)
    try:
        if is_launched():
            launched = look_together(machine.hostname, str(gloo), quick=quick)
            return Findings(machine, gloo, reached, launched.speed, launched=launched)
        return Findings(machine, gloo, reached, measure(quick=quick))
    except (RuntimeError, TimeoutError) as error:
        last = str(error).strip().splitlines()[-1].rstrip(".")
        return Findings(machine, gloo, reached, None, last)


def _chosen(interface: str | None, there: Sequence[Interface]) -> Sequence[Interface]:
    if interface is None:
        return there
    found = [one for one in there if one.name == interface]
    if not found:
        names = ", ".join(one.name for one in there)
        raise CommandError(f"there is no network interface {interface!r} here; there are {names}")
    return found


def faults(findings: Findings) -> list[str]:
    """Sentences on what is broken and must work."""
    found = []
    if not findings.machine.backends["gloo"]:
        found.append("this torch has no Gloo, which ranks on CPUs need to connect: install one that has it.")
    if findings.gloo.problem:
        found.append(f"Gloo cannot listen on {findings.gloo}: {findings.gloo.problem}.")
    for one in findings.reached:
        if one.problem and one.through != "hostname":
            found.append(
                f"a store on this host cannot be reached through {one.through} ({one.address}): {one.problem}."
            )
    if findings.speed is None and not findings.gloo.problem:
        found.append(f"ranks cannot exchange anything: {findings.speed_problem}.")
    return found


def advise(findings: Findings) -> list[str]:
    """Sentences on what could be improved."""
    return [one for one in (_of_memory(findings), _of_host_name(findings), _of_threads(findings.machine)) if one]


def _of_memory(findings: Findings) -> str:
    left = findings.machine.available_memory
    if findings.launched is not None and len(findings.launched.speed.timings) > 1:
        return ""  # each host has shared memory
    if findings.speed is not None and findings.speed.no_shared_memory:
        return (
            f"No shared memory because {findings.speed.no_shared_memory}: gradients go through Gloo inside this host."
        )
    if left is not None and left < LITTLE_MEMORY:
        return f"Only {format_bytes(left)} of memory is left for buckets: raise the limit."
    return ""


def _of_host_name(findings: Findings) -> str:
    outward = [one.name for one in findings.machine.interfaces if one.up and one.addresses and not one.is_loopback]
    chosen = findings.gloo
    if chosen.by == "GLOO_SOCKET_IFNAME" or chosen.address is None or not is_loopback(chosen.address):
        return ""
    name = findings.machine.hostname
    why = f"resolves to {chosen.address}" if chosen.by == "hostname" else "has no address of this host"
    change = f"set GLOO_SOCKET_IFNAME={outward[0]}" if outward else "give this host a network interface"
    return f"The host name {name} {why}, where other hosts cannot reach Gloo: for several hosts, {change}."


def _of_threads(machine: LocalMachine) -> str:
    told = machine.omp_num_threads or ""
    if told.isdigit() and int(told) > machine.cores:
        return f"OMP_NUM_THREADS={told} on {machine.cores} cores: threads wait for each other; unset it, or lower it."
    if machine.threads > machine.cores:
        return f"torch would use {machine.threads} threads on {machine.cores} cores: set OMP_NUM_THREADS."
    return ""


# Text


def _machine(machine: LocalMachine) -> list[str]:
    v = machine.versions
    has = [name for name, there in machine.backends.items() if there]
    lacks = [name for name, there in machine.backends.items() if not there]
    available, limit = machine.available_memory, machine.memory_limit
    memory = "not known" if available is None else f"{format_bytes(available)} available"
    rows = [
        ("versions", f"stretto {v['stretto']}, torch {v['torch']}, Python {v['python']}"),
        ("system", f"{v['system']}, kernel {v['kernel']}, {v['machine']}"),
        ("backends", ", ".join(has or ["none"]) + (f" (not {', '.join(lacks)})" if lacks else "")),
        ("accelerators", ", ".join(machine.accelerators) or "none"),
        (
            "cores",
            f"{machine.cores} of {machine.all_cores}; torch uses {counted(machine.threads, 'threads')} a process",
        ),
        ("OMP_NUM_THREADS", machine.omp_num_threads or "not set (`stretto run` divides the cores among the ranks)"),
        ("memory", memory + (f", control group's limit {format_bytes(limit)}" if limit else ", no limit below that")),
        ("open files", "no limit" if machine.open_files is None else f"at most {machine.open_files} a process"),
    ]
    return [f"{name:<16}{text}" for name, text in rows]


def _network(findings: Findings) -> list[str]:
    lines = [f"{'interfaces':<16}{', '.join(map(str, findings.machine.interfaces))}"]
    lines.append(f"{'Gloo listens on':<16}{findings.gloo}")
    for one in findings.reached:
        lines.append(f"{'store':<16}{one.through} ({one.address}): {one.problem or 'reached'}")
    for place in findings.launched.places if findings.launched else ():
        lines.append(f"{'ranks':<16}{place}")
    return lines


def _speed(findings: Findings) -> list[str]:
    if findings.speed is None:
        return []
    problem, launched = findings.speed.no_shared_memory, findings.launched
    some = "two processes" if launched is None else f"{launched.world_size} ranks"
    lines = [f"{'shared memory':<16}" + (problem or f"yes: {some} have read each other's memory")]
    if launched is not None:
        lines.append(f"{'gradients take':<16}{[*findings.speed.timings][-1]}")
    through = os.environ.get("GLOO_SOCKET_IFNAME", "loopback" if launched is None else "")
    rows = [(f"all-reduce, {launched.world_size if launched else 2} ranks", "size", "median", *_HEADS)]
    for transport, timings in findings.speed.timings.items():
        name = f"{transport} over {through}" if through and transport == "process_group" else transport
        for one in timings:
            spread = f"{_short(one.low)} - {_short(one.high)}"
            rate = f"{format_bytes(one.bytes_per_second)}/s" if one.nbytes > 4 else "-"
            rows.append((name, format_bytes(one.nbytes), _short(one.median), spread, rate))
    return [*lines, "", columns(rows)]


def _short(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else ms(seconds)
