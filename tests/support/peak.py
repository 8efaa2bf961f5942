"""``python -m tests.support.peak ARGUMENTS``: ``vlm-pg ARGUMENTS``, and at the end the most memory that it has held."""

from __future__ import annotations

import resource
import sys

from vlm_pg.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    print("peak KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sys.exit(code)
