"""Size of an evaluation's report of many answers, seconds to write it, and seconds until a browser shows it.

    python docs/benchmarks/measure_report.py --out FILE.json [--questions 10000] [--answers 8] [--words 120]
        [--pictures 200] [--repeats 3] [--folder FOLDER]

Answers are words drawn from 4,000 made-up ones by frequencies that fall as 1/rank, so that they compress as prose does;
the first questions have strips of eight frames of noise, as large as those of ``vlm-pg eval``. The page is opened in a
headless Chromium, where one is installed, in a new window each time: ``open_seconds`` until the page is read and its
questions can be looked at, ``last_seconds`` from the key that goes to the last question until that is shown,
``search_seconds`` from a word typed into the search until its questions are listed. Without a browser these are null.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.browser import PROGRAM, Browser, browser
from tests.support.eval_results import output, question, write_results
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.report.page import write_eval_report

_WORDS, _LETTERS = 4000, "etaoinshrdlucmfwypvbgkjqxz"
_CATEGORIES = ("order", "count", "place", "cause", "object")
# Only one answer has it.
_RARE = "unmistakable"


def rows(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[Answered, dict[str, Any] | None]]:
    """Questions with their answers, and what was shown of the first ones."""
    chance = random.Random(0)
    words = ["".join(chance.choices(_LETTERS, k=chance.randrange(2, 11))) for _ in range(_WORDS)]
    weights = list(accumulate(1 / rank for rank in range(1, _WORDS + 1)))
    (folder / "thumbnails").mkdir(parents=True)
    for place in range(arguments.questions):
        outputs = []
        for number in range(arguments.answers):
            right = chance.random() < 0.4
            letter = "B" if right else chance.choice("ACD")
            prose = " ".join(chance.choices(words, cum_weights=weights, k=arguments.words))
            rare = f" {_RARE}" if (place, number) == (arguments.questions // 2, 0) else ""
            outputs.append(output(f"<think>{prose}{rare}</think><answer>{letter}</answer>", letter, float(right)))
        asked = question(
            f"q{place:05d}",
            outputs,
            text=" ".join(chance.choices(words, cum_weights=weights, k=12)),
            options=[f"{letter}. {chance.choice(words)}" for letter in "ABCD"],
            category=chance.choice(_CATEGORIES),
            cluster=f"{place // 3}.mp4",
        )
        shown = {"frames": [_strip(folder, place)]} if place < arguments.pictures else None
        yield asked, shown


def _strip(folder: Path, place: int) -> str:
    """Eight frames of coarse noise side by side, as evaluations keep them; its path in the folder."""
    noise = np.random.default_rng(place).integers(0, 256, (14, 8 * 25, 3), dtype=np.uint8)
    name = f"thumbnails/{place}.jpg"
    Image.fromarray(noise).resize((8 * 199 + 7 * 3, 130), Image.Resampling.BICUBIC).save(folder / name, quality=82)
    return name


def opened(page: Browser, report: Path, last: str) -> dict[str, float]:
    """Seconds until the page can be used, until its last question is there, and until a search has its result."""
    start = time.perf_counter()
    page.open(report)
    page.wait("document.querySelector('.detail .head code') !== null")
    ready = time.perf_counter()
    page.read("document.querySelector('#list').focus()")
    page.press("End")
    page.wait(f"document.querySelector('.detail .head code').textContent === {json.dumps(last)}")
    at_last = time.perf_counter()
    page.click("#search")
    page.write(_RARE)
    page.wait("document.querySelector('#found').textContent.startsWith('1 of ')")
    found = time.perf_counter()
    heap = page.read("performance.memory.usedJSHeapSize")
    return {
        "open_seconds": ready - start,
        "last_seconds": at_last - ready,
        "search_seconds": found - at_last,
        "heap_mb": heap / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("questions", 10_000), ("answers", 8), ("words", 120), ("pictures", 200), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--folder", type=Path, help="where the report is kept; default: nowhere")
    parser.add_argument("--out", type=Path, help="default: printed alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)) / "run"
        if folder.exists():
            parser.error(f"{folder} exists. A folder without one is expected. Name another with --folder.")
        write_results(folder, {"seen": list(rows(folder, arguments))})
        start = time.perf_counter()
        report = write_eval_report(folder)
        write_seconds = time.perf_counter() - start
        runs: list[dict[str, float]] = []
        if PROGRAM is not None:
            for number in range(arguments.repeats):
                with browser(Path(temporary) / f"profile-{number}") as page:
                    runs.append(opened(page, report, f"q{arguments.questions - 1:05d}"))
        result = {
            "command": " ".join(["python", "docs/benchmarks/measure_report.py", *sys.argv[1:]]),
            "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
            "browser": None if PROGRAM is None else _version(PROGRAM),
            "questions": arguments.questions,
            "answers": arguments.questions * arguments.answers,
            "answers_mb": (folder / "answers_seen.jsonl").stat().st_size / 1e6,
            "report_mb": report.stat().st_size / 1e6,
            "write_seconds": write_seconds,
            "runs": runs or None,
        }
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text)
    print(text, end="")


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
