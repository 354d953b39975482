"""``stretto bench``: a model of your own, or a built-in one, under stretto, torch DDP and others, in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench import Comparison, Effort, compare
from ..bench.compare import UNLIMITED
from ..bench.factory import FORMS
from ..bench.plots import check, plot
from ..terminal import show_cursor
from .console import FINE, WRONG, AsJson, CommandError, check_writable, note, say, say_json, write
from .link import parse_bandwidth
from .ranks import check_room


def bench(
    model: Annotated[str, typer.Argument(help=FORMS)] = "gpt2",
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Processes on this machine.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads that torch may use in each process.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds at most; each contestant runs once a round.")] = 30,
    seconds: Annotated[float, typer.Option(help="No new round begins after this; at least five run.")] = 30.0,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only contestants with this in their name, and the step without communication. Repeatable."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Put the ranks on two emulated hosts with a cable of 1gbit, 100mbit, 125MB/s or unlimited."),
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw bars to this file (.svg, .png, .pdf).")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare stretto with torch DDP and others on a model of your own.

    All train the same model in the same processes, in turn, in an order that changes every round. It shows the time of
    an SGD step (the slower rank's), and its ratio to the same step without any communication. The exit code is 1 if
    stretto could not train the model.
    """
    if rounds < 1:
        raise CommandError(f"--rounds {rounds}: must be 1 or more")
    if not seconds > 0:
        raise CommandError(f"--seconds {seconds:g}: must be positive")
    effort, network = Effort(rounds, seconds), _cable(network)
    check_room(ranks)
    if plot_file is not None:
        check(plot_file)
        check_writable(plot_file)
    found = _compared(model, ranks, threads, effort, only or [], network)
    if as_json:
        say_json(found.to_dict())
    else:
        say(str(found))
    drawn = plot_file is None or _drawn(found, plot_file)
    missing = {name: reason for name, reason in found.skipped.items() if name.startswith("stretto")}
    for name, reason in missing.items():
        note(f"{name} did not take part: {reason}")
    return FINE if drawn and not missing else WRONG


def _drawn(found: Comparison, file: Path) -> bool:
    """Failures come after the measured figures, which took long and must not be lost."""
    try:
        write(file, lambda unfinished: plot(found, unfinished))
    except (CommandError, ImportError) as error:
        note(str(error))
        return False
    return True


def _cable(network: str | None) -> str | None:
    """As ``tc`` writes it."""
    if network in (None, UNLIMITED):
        return network
    bits = parse_bandwidth(network, "--network")
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    return next((f"{bits / size:.0f}{unit}" for unit, size in units.items() if not bits % size), f"{bits:.0f}bit")


def _compared(model: str, ranks: int, threads: int, effort: Effort, only: list[str], network: str | None) -> Comparison:
    try:
        return compare(
            model, ranks, threads=threads, effort=effort, only=only, network=network, progress=True, timeout=3600
        )
    except KeyboardInterrupt:
        show_cursor()  # hidden by rank 0's bar until now
        raise
    except TimeoutError as error:  # an OSError too
        raise CommandError(str(error), WRONG) from error
    except OSError as error:
        raise CommandError(f"--network {network}: {error}" if network else str(error), WRONG) from error
    except RuntimeError as error:  # with the traceback of each rank that failed
        if isinstance(error, ValueError):
            raise  # of the options, in one line
        raise CommandError(f"a rank failed: {str(error).strip().splitlines()[-1]}", WRONG) from error
