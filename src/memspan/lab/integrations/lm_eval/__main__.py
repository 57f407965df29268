"""The harness's command line with the model ``memspan``.

Run it as ``python -m memspan.lab.integrations.lm_eval``."""

import sys

from lm_eval.__main__ import cli_evaluate

import memspan.lab.integrations.lm_eval  # noqa: F401  (registers the model)
from memspan.errors import MemspanError

try:
    cli_evaluate()
except MemspanError as error:
    print(f"memspan: {error}", file=sys.stderr)
    sys.exit(2)
