"""``python -m docsite``: build the site, or say that all notes have been read."""

from __future__ import annotations

import argparse
import sys

from docsite import annotated, read_state
from docsite.errors import DocsError


def main() -> int:
    """Run a command; a mistake in a page is one line and status 1."""
    parser = argparse.ArgumentParser(prog="docsite", description=__doc__)
    parser.add_argument("command", choices=["build", "read"])
    try:
        if parser.parse_args().command == "read":
            read_state.accept(annotated.pages())
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
