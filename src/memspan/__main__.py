"""``python -m memspan``."""

import sys

if not sys.flags.safe_path:
    # The current folder, which ``python -m`` and torchrun put first: files in it may be anyone's.
    del sys.path[0]

try:
    from memspan.cli import main
except KeyboardInterrupt:
    # A launcher's process that is stopped while it still imports; the launcher says so.
    sys.exit(130)

main()
