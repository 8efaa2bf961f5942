"""Small sets of records with media and a configuration, and what ``vlm-pg check`` finds of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.processes import ROOT
from tests.support.runs import write_config
from vlm_pg import cli

Record = Mapping[str, Any]


def record(number: object, **changes: Any) -> dict[str, Any]:
    """A question about nothing that can be used."""
    fields = {
        "problem_id": number,
        "problem": f"Which colour has lamp {number}?",
        "data_type": "text",
        "problem_type": "multiple choice",
        "options": ["A. red", "B. blue"],
        "solution": "<answer>A</answer>",
        "path": "",
        "data_source": "lamps",
    }
    return {**fields, **changes}


def about(number: object, path: str, **changes: Any) -> dict[str, Any]:
    """A question about a medium."""
    kind = "video" if path.endswith((".mkv", ".mp4", ".mov")) else "image"
    return record(number, path=path, data_type=kind, **changes)


class Folder:
    """Records, media and a configuration."""

    def __init__(self, path: Path, media: Path):
        self.path = path
        for name in ("video_90.mov", "corrupted.mp4", "av1_video.mkv"):
            (path / name).write_bytes((media / name).read_bytes())
        (path / "again.mov").write_bytes((media / "video_90.mov").read_bytes())
        pixels = np.random.default_rng(1).integers(0, 256, (90, 130, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / "a.png")
        (path / "b.png").write_bytes((path / "a.png").read_bytes())
        Image.fromarray(pixels[::-1]).save(path / "c.png")

    def check(
        self, train: Sequence[Record] = (), held: Sequence[Record] = (), *words: str, **sections: Mapping[str, Any]
    ) -> tuple[int, dict[str, list[str]]]:
        """Exit code, and the locations and ids of each reason, warnings with a mark; nothing where it was refused."""
        data: dict[str, Any] = {}
        for name, records in (("train", train), ("held", held)):
            if records:
                (self.path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        data |= {"train": str(self.path / "train.jsonl")} if train else {}
        data |= {"eval": {"held": str(self.path / "held.jsonl")}} if held else {}
        values: dict[str, Any] = {
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl")},
            "data": data | dict(sections.pop("data", {})),
            "media": {"workers": 0, "max_frames": 4, "max_pixels": 16 * 784} | dict(sections.pop("media", {})),
            "training": {"steps": 1, "micro_batch_tokens": 40_000},
        }
        values |= sections
        config = write_config(self.path / "run.yaml", values)
        code = cli.main(["check", str(config), "--out", str(self.path / "out"), *words])
        return code, {} if code == 2 else self.found()

    def found(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, mark in (("refused", ""), ("warned", "?")):
            for line in (self.path / "out" / f"{name}.jsonl").read_text().splitlines():
                one = json.loads(line)
                found.setdefault(one["reason"] + mark, []).append(f"{one['where']} {one['sample_id']}")
        return found

    def messages(self) -> list[str]:
        text = (self.path / "out/refused.jsonl").read_text() + (self.path / "out/warned.jsonl").read_text()
        return [json.loads(line)["message"] for line in text.splitlines()]


CLEAN = [record(1), about(2, "video_90.mov"), about(3, "av1_video.mkv", start=1.0, end=2.0), about(4, "a.png")]
