"""Video-R1's recipe on files laid out as published: its chains of thought, then T-GRPO from what they gave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors.torch import load_file

from tests.support.runs import ROOT, read_lines
from tests.support.short_run import train_here
from vlm_pg.cli import main

# What is smaller here than on 8 GPUs.
SMALL: dict[str, Any] = {
    "media": {"workers": 0, "max_frames": 8, "max_pixels": 28224},
    "rollout": {"max_new_tokens": 48},
    "observe": {"trackers": [], "report": True},
    "eval": {"limit": None},
}
TRAINING = {"engine": "torch", "deepspeed_config": None, "steps": 2, "prompts_per_step": 4, "checkpoint_every": 1}


def lay_out(folder: Path, media_dir: Path) -> None:
    """As the authors' archives unpack: both JSON arrays beside folders of media."""
    folder.mkdir()
    (folder / "Real").mkdir()
    (folder / "Chart").mkdir()
    records = []
    for record in json.loads((media_dir / "questions.json").read_text()):
        path = f"./Real/{Path(record['path']).name}"
        shutil.copy(media_dir / record["path"], folder / path)
        records.append(record | {"path": path, "process": ""})
    rng = np.random.default_rng(0)
    for number in range(4):
        picture = rng.integers(0, 256, (112, 112, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / "Chart" / f"{number}.png")
        records.append(
            {
                "problem_id": 100 + number, "problem": "Which bar is the highest?", "data_type": "image",
                "problem_type": "multiple choice", "options": ["A. left", "B. right"], "process": "",
                "solution": f"<answer>{'AB'[number % 2]}</answer>", "path": f"./Chart/{number}.png",
                "data_source": "Chart/charts",
            }
        )  # fmt: skip
    (folder / "Video-R1-260k.json").write_text(json.dumps(records))
    thoughts = [one | {"process": f"<think>Let me look at {i} things.</think>"} for i, one in enumerate(records)]
    (folder / "Video-R1-COT-165k.json").write_text(json.dumps(thoughts[::-1]))


def test_the_whole_recipe_runs_from_two_commands(tmp_path: Path, media_dir: Path) -> None:
    data = tmp_path / "Video-R1-data"
    lay_out(data, media_dir)
    assert main(["prepare", "video_r1", str(data), "--media-root", str(data), "--out", str(tmp_path / "rl")]) == 0
    cot = ["--train", str(data / "Video-R1-COT-165k.json"), "--media-root", str(data)]
    assert main(["prepare", "video_r1", *cot, "--out", str(tmp_path / "cot")]) == 0
    for name, records in (("_sft", "cot"), ("", "rl")):
        values: dict[str, Any] = SMALL | {
            "include": [str(ROOT / f"configs/qwen2_5_vl_7b_video_r1{name}.yaml")],
            "run": {"dir": str(tmp_path / f"run_{records}")},
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl"), "dtype": "fp32"},
            "data": {
                "train": f"{tmp_path / records}:train",
                "media_root": str(data),
                "eval": {"heldout": f"{tmp_path}/rl:train"},
            },
            "training": TRAINING,
        }
        if not name:
            values["rollout"] = SMALL["rollout"] | {"num_generations": 2}
            values["algorithm"] = {"length_bonus_tokens": [4, 40]}
        (tmp_path / f"{records}.yaml").write_text(yaml.safe_dump(values))
    first = train_here(tmp_path / "cot.yaml")
    assert first.code == 0, first.printed
    last = tmp_path / "run_cot/checkpoints/step-000002"
    second = train_here(tmp_path / "rl.yaml", f"model.path={last}")
    assert second.code == 0, second.printed
    of_both = [read_lines(tmp_path / f"run_{name}" / "metrics.jsonl") for name in ("cot", "rl")]
    assert [("nll" in line, "reward" in line) for line in of_both[0]] == [(True, False)] * 2
    assert [("nll" in line, "temporal/bonus_share" in line) for line in of_both[1]] == [(False, True)] * 2
    assert "Negative log-likelihood of responses" in (tmp_path / "run_cot/report.html").read_text()
    assert "bad sample" not in first.printed + second.printed
    start, end = load_file(ROOT / "assets/tiny-qwen2_5-vl/model.safetensors"), load_file(last / "model.safetensors")
    assert any((end[name] != weight).any() for name, weight in start.items())
