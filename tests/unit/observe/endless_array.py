"""Appends to an array until it is killed: python -m ... PATH."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from vlm_pg.observe.timeline import ArrayFile

if __name__ == "__main__":
    file = ArrayFile(Path(sys.argv[1]))
    for number in count():
        file.append([{"number": number, "text": "x" * (number % 300)}] * 3)
