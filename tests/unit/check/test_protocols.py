"""Evaluation sets are checked as they are presented: in the words, frames and limits of their protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoProcessor

from tests.support.checking import Folder, about, record
from tests.support.processes import ROOT
from tests.support.runs import write_config
from vlm_pg import cli

MODEL = ROOT / "assets/tiny-qwen2_5-vl"
OWN: dict[str, Any] = {
    "source": "made up",
    "system": "You look closely.",
    "templates": {"multiple_choice": "Look. {question}\n{options}\nOnly the letter."},
    "answer_prefix": "Best option:(",
    "media": {"frames": "uniform", "num_frames": 2, "max_pixels": 4 * 784},
    "max_new_tokens": 9,
}


def protocol_of(folder: Folder, name: str = "own", **changes: Any) -> dict[str, Any]:
    """Section ``eval`` that presents the set ``held`` under the protocol."""
    path = folder.path / f"{name}.yaml"
    write_config(path, OWN | changes)
    return {"eval": {"protocols": {"held": str(path)}}}


def tokens(folder: Folder, name: str = "data.eval.held") -> dict[str, int]:
    found: dict[str, int] = json.loads((folder.path / "out/check.json").read_text())["sets"][name]["prompt_tokens"]
    return found


def by_the_template(words: str, grid_tokens: int = 0) -> int:
    """Tokens of a prompt of these words, written out as Qwen's template has it, a video of so many tokens before."""
    media = f"<|vision_start|>{'<|video_pad|>' * grid_tokens}<|vision_end|>" if grid_tokens else ""
    text = (
        "<|im_start|>system\nYou look closely.<|im_end|>\n"
        f"<|im_start|>user\n{media}{words}<|im_end|>\n<|im_start|>assistant\nBest option:("
    )
    return len(AutoProcessor.from_pretrained(MODEL).tokenizer(text)["input_ids"])


def test_lengths_are_those_of_the_protocols_words(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    held = [record(1, problem="Which one?")]
    code, found = folder.check((), held, **protocol_of(folder))
    assert (code, found) == (0, {})
    expected = by_the_template("Look. Which one?\nA. red\nB. blue\nOnly the letter.")
    assert tokens(folder)["max"] == expected
    assert "data.eval.held: prompts in the words, frames and limits of protocol" in capsys.readouterr().out
    folder.check((), held)
    assert tokens(folder)["max"] != expected


def test_frames_are_the_protocols_and_training_keeps_its_own(folder: Folder) -> None:
    """One file in both sets, looked at once for each way of showing it: 4 frames in training, 2 under the protocol."""
    records = [about(1, "av1_video.mkv", problem="Which one?")]
    folder.check(records, records, **protocol_of(folder))
    both = tokens(folder, "data.train")["max"], tokens(folder)["max"]
    folder.check(records, records)
    alike = tokens(folder, "data.train")["max"], tokens(folder)["max"]
    assert alike[0] == alike[1] == both[0]
    words = "Look. Which one?\nA. red\nB. blue\nOnly the letter."
    # One temporal patch of at most 4 visual tokens.
    assert both[1] in {by_the_template(words, count) for count in (1, 2, 3, 4)}


def test_limits_are_the_protocols(folder: Folder) -> None:
    held = [record(1, problem="Which one?"), record(2, problem="Which of them? " * 30)]
    code, found = folder.check((), held, **protocol_of(folder, max_prompt_tokens=100))
    assert (code, found) == (1, {"prompt_too_long": ["held.jsonl:2 2"]})
    assert folder.check((), held, **protocol_of(folder, max_prompt_tokens=1000))[0] == 0
    code, found = folder.check((), held[:1], **protocol_of(folder, max_new_tokens=10**7))
    assert (code, found) == (1, {"too_long_for_model": ["held.jsonl:1 1"]})


def test_questions_that_a_protocol_does_not_ask_are_left_out_and_counted(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count towards no limit either; as the evaluation chooses."""
    open_one = record(1, problem_type="numerical", options=[], solution="<answer>3</answer>", path="lost.png")
    held = [open_one | {"data_type": "image"}, record(2), record(3), record(4)]
    sections = protocol_of(folder)
    sections["eval"]["limit"] = 2
    assert folder.check((), held, **sections) == (0, {})
    assert "2 records, 2 usable, 0 not; 0 media; 2 more are left out" in capsys.readouterr().out


def test_a_file_that_is_a_set_of_the_run_is_asked_as_the_run_asks_it(folder: Folder) -> None:
    held = [record(1, problem="Which one?")]
    folder.check((), held, **protocol_of(folder))
    words = [str(folder.path / "held.jsonl"), str(folder.path / "run.yaml"), "--out", str(folder.path / "out")]
    assert cli.main(["check", *words]) == 0
    assert tokens(folder, "DATA")["max"] == by_the_template("Look. Which one?\nA. red\nB. blue\nOnly the letter.")
