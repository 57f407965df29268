"""``python -m docsite``: build the site, draw its figures, say that all notes have been read, or have
notebooks install from ``REPOSITORY``."""

from __future__ import annotations

import argparse
import os
import sys

from docsite import annotated, figures, notebooks, read_state
from docsite.errors import DocsError


def main() -> int:
    """Run a command; a mistake in a page is one line and status 1."""
    parser = argparse.ArgumentParser(prog="docsite", description=__doc__)
    parser.add_argument("command", choices=["build", "figures", "notebooks", "read"])
    try:
        command = parser.parse_args().command
        if command == "read":
            read_state.accept(annotated.pages())
        elif command == "figures":
            figures.draw_all()
        elif command == "notebooks":
            notebooks.write_address(os.environ.get("REPOSITORY", ""))
        else:
            # Only this needs zensical and what it brings.
            from docsite import staging

            staging.build()
            print(f"open {staging.SITE / 'index.html'}")
    except DocsError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
