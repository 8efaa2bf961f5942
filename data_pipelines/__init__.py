"""Raw data set -> prepared records: one file per data set, each ``python -m data_pipelines.NAME --out DIR``.

``vlm_pg`` never imports this package. The rules for its imports are in pyproject.toml ([tool.importlinter]).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from vlm_pg.errors import VlmPgError


def run(main: Callable[..., int]) -> int:
    """Run a pipeline as a script: an error that the user can correct is one message on stderr and exit code 2."""
    try:
        return main()
    except VlmPgError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
