"""``python -m memspan``."""

import os
import sys

if not sys.flags.safe_path:
    # The current folder, which ``python -m`` and torchrun put first: files in it may be anyone's.
    del sys.path[0]

if "MEMSPAN_LAUNCHED" in os.environ:
    import signal

    # Until all is imported, Ctrl-C ends a process of ours at once: an exception would be lost in
    # callbacks of Python's import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    from memspan.lab.cli import main
except KeyboardInterrupt:
    # Stopped during the imports; the launcher of several processes says so.
    sys.exit(130)

main()
