"""``vlm-pg bench eval``: contestants agree on a small point, its numbers are kept, and bounds count what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vlm_pg.bench.evaluation.case import EvalCase, check_prompts
from vlm_pg.bench.evaluation.files import write_files
from vlm_pg.bench.evaluation.ours import apart, together
from vlm_pg.bench.evaluation.shown import Shown, head_tokens, tail_tokens
from vlm_pg.bench.flops import tower_flops
from vlm_pg.bench.grid import EvalPoint
from vlm_pg.bench.shapes import TOWERS, TowerShape
from vlm_pg.bench.work import apart_evaluation, causal_pairs, repeated_evaluation, shared_evaluation
from vlm_pg.cli import main
from vlm_pg.errors import ConfigError
from vlm_pg.media import decode_file

POINT = EvalPoint(32, 2, 3, 2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> EvalCase:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder, POINT, apart=True)
    spec = {"model": "small", "dtype": "fp32", "device": "cpu", "folder": str(folder), **POINT.record}
    return EvalCase.build(spec)


def test_a_point_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    chosen = ["--contestants", "ours", "transformers-generate", "ours-one-question-a-video"]
    common = ["bench", "eval", "--model", "small", "--repeats", "1", "--threads", "1", "--device", "cpu", "--no-memory"]
    common += [*chosen, "--out", str(out)]
    assert main([*common, "--points", "32,2,3,2"]) == 0
    result = json.loads(out.read_text())
    (point,) = result["points"]
    assert result["measurement"] == "eval" and not point["failed"]
    assert {key: point[key] for key in POINT.identity} == POINT.identity
    ours, generate, alone = (point["contestants"][name] for name in chosen[1:])
    assert generate["equal_tokens"] == 1.0 and generate["prompt_tokens"] == ours["prompt_tokens"]
    assert (ours["videos_encoded"], generate["videos_encoded"], alone["videos_encoded"]) == (1, 2, 2)
    assert all(len(entry["media_seconds"]) == len(entry["seconds"]) == 1 for entry in (ours, generate, alone))
    printed = capfd.readouterr().out
    assert "s a question" in printed and "several questions on one video, times as fast a question" in printed
    assert main(["bench", "figure", str(out)]) == 2
    assert "There is no figure of `vlm-pg bench eval`" in capfd.readouterr().err


def test_what_is_counted_is_what_is_shown(case: EvalCase) -> None:
    with together(case) as answering:
        prompts = answering.prompts()
    shown = Shown.of(POINT.prefix)
    assert {prompt.num_visual_tokens for prompt in prompts} == {shown.visual_tokens}
    assert {prompt.num_tokens for prompt in prompts} == {head_tokens() + shown.visual_tokens + tail_tokens()}
    assert prompts[0].grid_thw is not None and int(prompts[0].grid_thw.prod()) == 2 * shown.frame_patches
    assert prompts[0].content_key == prompts[1].content_key
    with apart(case) as answering:
        assert len({prompt.content_key for prompt in answering.prompts()}) == 2


def test_other_pixels_or_ids_stop_the_measurement(case: EvalCase) -> None:
    with together(case) as answering:
        prompts = answering.prompts()
    check_prompts("ours", prompts, "other", list(prompts))
    with pytest.raises(RuntimeError, match=r"question 0 by ours and other differ: \d+ and \d+ tokens, not the same"):
        check_prompts("ours", prompts, "other", prompts[::-1])
    from dataclasses import replace

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
    patches = MERGED * Shown.of(POINT.prefix).visual_tokens
    for contestant, videos in ((together, 1), (apart, 2)):
        decoded.clear()
        before = case.policy.vision.patches_run
        with contestant(case) as answering:
            answering.evaluate()
        assert len(decoded) == videos and case.policy.vision.patches_run - before == videos * patches


MERGED = 4


def test_work_is_counted_by_hand() -> None:
    """Two questions on each of two videos, two answers of three tokens; h, v, t: tokens before, in, behind a video."""
    point = EvalPoint(32, 2, 3, 2, 2)
    h, v, t = head_tokens(), Shown.of(32).visual_tokens, tail_tokens()
    # 140 x 252 pixels at most 16 visual tokens: 3 x 5 in each of two steps of time
    assert (h, v) == (7, 30)
    ours, alone, theirs = (work(point) for work in (shared_evaluation, apart_evaluation, repeated_evaluation))
    assert ours.generation.prefill.tokens == 2 * (h + v) + 4 * t and ours.towers == 2
    assert ours.generation.prefill.pairs == 2 * causal_pairs(h + v) + 4 * (t * (h + v) + causal_pairs(t))
    assert alone.generation.prefill.tokens == 4 * (h + v + t) and alone.towers == 4
    assert theirs.generation.prefill.tokens == 4 * 2 * (h + v + t) and theirs.towers == 4
    decodes = [work.generation.decode for work in (ours, alone, theirs)]
    assert {(one.tokens, one.pairs, one.logit_rows) for one in decodes} == {(16, decodes[0].pairs, 16)}
    assert [one.held_tokens for one in decodes] == [8, 8, 2]
    assert (ours.generation.steps, theirs.generation.steps) == (2, 8)
    assert theirs.generation.prefill.held_tokens == 2 * (h + v + t)
    # rollouts read two tokens each, behind their prompt: 8 * (2 * prompt + 1 + 2) pairs
    assert ours.generation.decode.pairs == 8 * (2 * (h + v + t) + 3)


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


def test_points_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="16 visual tokens"):
        EvalPoint(15, 8, 16)
    with pytest.raises(ConfigError, match="0 questions on each"):
        EvalPoint(64, 8, 16, 0)
    with pytest.raises(SystemExit):
        main(["bench", "eval", "--figure", "x.svg"])


def test_greedy_answers_are_those_on_disk(case: EvalCase) -> None:
    with together(case) as answering:
        tokens = answering.greedy()
    assert tokens.shape == (2, 3) and tokens.dtype == torch.int64
