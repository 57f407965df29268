"""``python -m statelaws``: the command line."""

from statelaws.cli import main

main()
