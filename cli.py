"""A launcher for a checkout: `python cli.py scan …` is `shardesd scan …`."""

from shardesd.cli import main

if __name__ == "__main__":
    main()
