"""``python -m memspan``."""

import sys

try:
    from memspan.cli import main
except KeyboardInterrupt:
    # A launcher's process that is stopped while it still imports; the launcher says so.
    sys.exit(130)

main()
