"""Instruments of the builders: measurements and counts that no training run needs. ``docs/benchmarks/README.md``.

Run from the repository's root as ``python -m scripts.bench.NAME``; the wheel does not install them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from vlm_pg.errors import VlmPgError


def run(main: Callable[[Sequence[str]], int]) -> None:
    """End this process with the program's exit code; 2 for an error that the user can put right."""
    try:
        sys.exit(main(sys.argv[1:]))
    except VlmPgError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
