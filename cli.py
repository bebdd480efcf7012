"""A launcher for a checkout: `python cli.py scan …` is `shardesd scan …`."""

from shardesd.__main__ import main

if __name__ == "__main__":
    main()
