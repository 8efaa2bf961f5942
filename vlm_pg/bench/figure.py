"""``vlm-pg bench figure``: a file of ``bench step`` (speed-up, its bound, peak memory) or ``bench rollout``, drawn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vlm_pg.bench import rollout, step
from vlm_pg.bench.drawing import KINDS, write_figure
from vlm_pg.bench.results import read_results


def main(argv: Sequence[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="vlm-pg bench figure", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON written by --out of `vlm-pg bench step` or `rollout`")
    parser.add_argument("--out", type=Path, help="SVG file (default: beside the JSON)")
    ours = {kind.ours for kind in KINDS.values()}
    others = [name for name in (*step.CONTESTANTS, *rollout.CONTESTANTS) if name not in ours]
    defaults = ", ".join(f"{measurement}: {kind.against}" for measurement, kind in KINDS.items())
    parser.add_argument("--against", choices=others, help=f"whom ours is compared with (default of {defaults})")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.file.with_suffix(".svg")
    print(write_figure(read_results(arguments.file), out, arguments.against))
    return 0
