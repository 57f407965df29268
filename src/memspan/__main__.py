"""``python -m memspan``."""

from memspan.cli import main

main()
