"""`python -m shardesd`."""

from shardesd.cli import main

main()
