"""``python -m stretto``: the command line."""

from .cli import main

if __name__ == "__main__":  # a rank that is spawned imports this module under another name
    main()
