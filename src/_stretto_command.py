"""What the command ``stretto`` starts with. It lies beside the package, whose import takes as long as torch's."""

import sys


def main() -> None:
    """Run one command. Ctrl-C ends it without a word from here on, not only when torch is there."""
    try:
        from rich.console import Console

        with Console(stderr=True).status("importing torch"):  # some seconds; nothing where that is no terminal
            from stretto.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
