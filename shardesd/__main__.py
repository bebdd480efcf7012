"""The command: `shardesd`, and `python -m shardesd`."""

import sys


def main() -> None:
    """See `shardesd.cli`."""
    try:
        from shardesd.cli import main as command
    except KeyboardInterrupt:  # in the tenth of a second that this takes
        sys.exit("error: interrupted")
    command()


if __name__ == "__main__":
    main()
