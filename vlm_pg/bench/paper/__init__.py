"""``vlm-pg bench paper``: what a GPU would be asked to do, counted without one."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run from the command line; see ``--help``."""
    from vlm_pg.bench.paper.command import run

    return run(argv)
