"""``scripts.bench.eval``: contestants agree on a small point, its numbers are kept, and bounds count what is done."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.eval import main, repeated_evaluation, shared_evaluation, tower_flops
from scripts.bench.eval_case import EvalCase, check_prompts, ours
from scripts.bench.eval_files import TOWERS, EvalPoint, Shown, TowerShape, head_tokens, tail_tokens, write_files
from vlm_pg.errors import ConfigError
from vlm_pg.media import decode_file
from vlm_pg.plan.flops import causal_pairs

POINT = EvalPoint(32, 2, 3, 2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> EvalCase:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder, POINT)
    spec = {"model": "small", "dtype": "fp32", "device": "cpu", "folder": str(folder), **POINT.record}
    return EvalCase.build(spec)


@pytest.mark.matrix
def test_a_point_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    chosen = ["--contestants", "ours", "transformers-generate"]
    common = ["--model", "small", "--repeats", "1", "--threads", "1", "--device", "cpu", "--no-memory"]
    common += [*chosen, "--out", str(out)]
    assert main([*common, "--points", "32,2,3,2"]) == 0
    result = json.loads(out.read_text())
    (point,) = result["points"]
    assert result["measurement"] == "eval" and not point["failed"]
    assert {key: point[key] for key in POINT.identity} == POINT.identity
    shared, generate = (point["contestants"][name] for name in chosen[1:])
    assert generate["equal_tokens"] == 1.0 and generate["prompt_tokens"] == shared["prompt_tokens"]
    assert (shared["videos_encoded"], generate["videos_encoded"]) == (1, 2)
    assert all(len(entry["media_seconds"]) == len(entry["seconds"]) == 1 for entry in (shared, generate))
    printed = capfd.readouterr().out
    assert "s a question" in printed and "ours, times as fast" in printed


def test_what_is_counted_is_what_is_shown(case: EvalCase) -> None:
    with ours(case) as answering:
        prompts = answering.prompts()
    shown = Shown.of(POINT.prefix)
    assert {prompt.num_visual_tokens for prompt in prompts} == {shown.visual_tokens}
    assert {prompt.num_tokens for prompt in prompts} == {head_tokens() + shown.visual_tokens + tail_tokens()}
    assert prompts[0].grid_thw is not None and int(prompts[0].grid_thw.prod()) == 2 * shown.frame_patches
    assert prompts[0].content_key == prompts[1].content_key


def test_other_pixels_or_ids_stop_the_measurement(case: EvalCase) -> None:
    with ours(case) as answering:
        prompts, tokens = answering.prompts(), answering.greedy()
    assert tokens.shape == (2, 3) and tokens.dtype == torch.int64
    check_prompts("ours", prompts, "other", list(prompts))
    with pytest.raises(RuntimeError, match=r"question 0 by ours and other differ: \d+ and \d+ tokens, not the same"):
        check_prompts("ours", prompts, "other", prompts[::-1])
    assert prompts[1].pixel_values is not None
    darker = [prompts[0], replace(prompts[1], pixel_values=prompts[1].pixel_values - 0.01)]
    with pytest.raises(RuntimeError, match="question 1 by ours and other differ: other pixels"):
        check_prompts("ours", prompts, "other", darker)


def test_a_video_of_several_questions_is_decoded_and_encoded_once(
    case: EvalCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Any] = []
    decode = decode_file.decode_video

    def counted(*arguments: Any) -> Any:
        decoded.append(arguments[1])
        return decode(*arguments)

    monkeypatch.setattr(decode_file, "decode_video", counted)
    patches = 4 * Shown.of(POINT.prefix).visual_tokens
    before = case.policy.vision.patches_run
    with ours(case) as answering:
        answering.evaluate()
    assert len(decoded) == 1 and case.policy.vision.patches_run - before == patches


def test_work_is_counted_by_hand() -> None:
    """Two questions on each of two videos, two answers of three tokens; h, v, t: tokens before, in, behind a video."""
    for numbers, message in (((15, 8, 16), "16 visual tokens"), ((64, 8, 16, 0), "0 questions on each")):
        with pytest.raises(ConfigError, match=message):
            EvalPoint(*numbers)
    point = EvalPoint(32, 2, 3, 2, 2)
    h, v, t = head_tokens(), Shown.of(32).visual_tokens, tail_tokens()
    # 140 x 252 pixels at most 16 visual tokens: 3 x 5 in each of two steps of time
    assert (h, v) == (7, 30)
    shared, theirs = (work(point) for work in (shared_evaluation, repeated_evaluation))
    assert shared.generation.prefill.tokens == 2 * (h + v) + 4 * t and shared.towers == 2
    assert shared.generation.prefill.pairs == 2 * causal_pairs(h + v) + 4 * (t * (h + v) + causal_pairs(t))
    assert theirs.generation.prefill.tokens == 4 * 2 * (h + v + t) and theirs.towers == 4
    decodes = [work.generation.decode for work in (shared, theirs)]
    assert {(one.tokens, one.pairs, one.logit_rows) for one in decodes} == {(16, decodes[0].pairs, 16)}
    # rollouts read two tokens each, behind their prompt: 8 * (2 * prompt + 1 + 2) pairs
    assert shared.generation.decode.pairs == 8 * (2 * (h + v + t) + 3)


def test_operations_of_a_tower_by_hand() -> None:
    """One patch of a tower of width 2 with two layers: 1176 pixels, 16 + 3 * 2 * 5 weights a layer, 8 and 64 met."""
    tower = TowerShape(hidden=2, layers=2, heads=1, intermediate=5, whole_frame_layers=(1,))
    linear = 2 * 2 * (4 * 4 + 3 * 2 * 5)
    met = (100 + 64) * 4 * 2
    merger = 2 * (8 * 8 + 8 * 3) / 4
    assert tower_flops(tower, 1, 100, 3) == 2 * 1176 * 2 + linear + met + merger
    assert tower_flops(tower, 200, 100, 3) == 200 * tower_flops(tower, 1, 100, 3)


def test_linear_weights_of_a_tower_are_those_of_the_model(case: EvalCase) -> None:
    """Forward operations without attention are twice the weights of linear layers, those of the merger a quarter."""
    visual = case.policy.family.vision_tower(case.model)
    weights = {name: p.numel() for name, p in visual.named_parameters() if p.dim() > 1}
    merger = sum(count for name, count in weights.items() if name.startswith("merger"))
    expected = 2 * (sum(weights.values()) - merger + merger / 4)
    tower = TOWERS["small"]
    met = (1 * 60 + 1 * 60) * 4 * tower.hidden  # frames of 60 patches are smaller than a window
    assert tower_flops(tower, 1, 60, 256) == pytest.approx(expected + met)
