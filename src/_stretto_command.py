"""What the command ``stretto`` starts with. It lies beside the package, whose import takes as long as torch's."""

import sys


def main() -> None:
    """Run one command. Ctrl-C ends it without a word from here on, not only when torch is there."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        # Nothing where that is no terminal, or one that cannot erase. Not redirected: torch's logging, which is set up
        # meanwhile, would keep what stands in for stderr, and be cut into lines of the terminal's width for good.
        spinner, to = Spinner("dots", "importing torch", style="status.spinner"), Console(stderr=True)
        some_seconds = Live(spinner, console=to, transient=True, redirect_stdout=False, redirect_stderr=False)
        try:  # inside: what it is stopped in may be the start, and the cursor is to come back
            if to.is_interactive:
                some_seconds.start()
            from stretto.cli import main as run
        finally:
            some_seconds.stop()
        run()
    except KeyboardInterrupt:
        sys.exit(130)
