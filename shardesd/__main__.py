"""`python -m shardesd`."""

from shardesd.cli import main

if __name__ == "__main__":
    main()
