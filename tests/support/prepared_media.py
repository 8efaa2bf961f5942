"""Sets of many small clips, for tests of preparing them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.tiny_media import mp4


def write_set(folder: Path, count: int) -> None:
    """``folder / "media"`` and questions on each clip. Of ten one is damaged, one a copy, and of one it is asked twice.

    ``train.jsonl``: of all. ``eval.jsonl``: of some more, one in four of which are copies of training's.
    """
    media = folder / "media"
    media.mkdir(parents=True)
    chance = random.Random(count)
    train, evaluation = [], []
    for number in range(count):
        content = mp4(number if number % 10 else number + 1, seconds=2, rate=8)
        if number % 10 == 3:
            index = chance.randrange(len(content) // 2)
            content = content[:index] + bytes(64) + content[index + 64 :] if number % 20 == 3 else content[:index]
        (media / f"{number}.mp4").write_bytes(content)
        train += [_record(f"{number}", f"{number}.mp4", number)] * (2 if number % 10 == 5 else 1)
    for number in range(0, count, 8):
        (media / f"eval-{number}.mp4").write_bytes(mp4(number if number % 32 == 0 else count + number, 2, 8))
        evaluation.append(_record(f"e{number}", f"eval-{number}.mp4", number))
    for name, records in (("train", train), ("eval", evaluation)):
        named = (record | {"problem_id": f"{name}-{index}"} for index, record in enumerate(records))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in named))


def _record(name: str, path: str, number: int) -> dict[str, object]:
    one = {"problem": f"What is {name}?", "data_type": "video", "problem_type": "numerical", "options": []}
    return one | {"process": "", "solution": f"<answer>{number}</answer>", "path": path, "data_source": "made-up"}


def command(folder: Path, out: Path, workers: int) -> list[str]:
    """The arguments of ``vlm-pg`` that prepare it, every frame decoded."""
    files = ["--train", str(folder / "train.jsonl"), "--eval", str(folder / "eval.jsonl"), "--decode"]
    return ["prepare", "video_r1", *files, "--media-root", str(folder / "media"), "--out", str(out)] + [
        "--workers",
        str(workers),
    ]
