"""metrics.jsonl and rollouts.jsonl hold each step once, with finite numbers or null."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.observe.builders import make_group, make_run, read_lines
from vlm_pg.errors import VlmPgError
from vlm_pg.metrics import Chart, Metric
from vlm_pg.observe.logs import Drawn, MetricsLog, RolloutsLog, draw_strip, pick_groups, read_drawn, shown_frames
from vlm_pg.observe.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", resume=False)


def test_a_line_is_on_disk_at_once_and_keeps_null_and_refuses_what_is_not_finite(folder: RunFolder) -> None:
    with MetricsLog(folder) as log:
        log.write(1, {"reward": 0.5, "kl": None, "groups_without_spread": 3})
        (line,) = read_lines(folder.metrics)
        for value in (float("nan"), float("-inf")):
            message = r"'grad_norm' of step 7 is (nan|-inf).*must be finite.*lower training\."
            with pytest.raises(VlmPgError, match=message):
                log.write(7, {"reward": 0.5, "grad_norm": value})
        with pytest.raises(KeyError, match="hide the line's own 'step'"):
            log.write(1, {"step": 3.0})
    assert line.pop("time") > 1.7e9
    assert line == {"step": 1, "phase": "train", "reward": 0.5, "kl": None, "groups_without_spread": 3}
    assert len(read_lines(folder.metrics)) == 1


def test_how_metrics_are_drawn_is_kept_over_starts_and_what_is_damaged_begins_anew(folder: RunFolder) -> None:
    first, chart = Metric("first", "s", chart=Chart("Seconds", 7, smooth=False)), Chart("Share", as_percent=True)
    with MetricsLog(folder) as log:
        log.write(1, {first: 1.0, "without a declaration": 2.0})
    with MetricsLog(folder, resume_step=1) as log:
        log.write(2, {Metric("second", chart=chart): 1.0})
        log.write(3, {Metric("second", chart=chart): 1.0, Metric("third", "m"): 1.0})
    assert read_drawn(folder.curves) == {
        "first": Drawn("s", first.chart), "second": Drawn("", chart), "third": Drawn("m", None)
    }  # fmt: skip
    folder.curves.write_text('{"first": 5}')
    with MetricsLog(folder, resume_step=3) as log:
        log.write(4, {first: 1.0})
    assert read_drawn(folder.curves) == {"first": Drawn("s", first.chart)}


def test_resume_moves_later_and_damaged_lines_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    folder.metrics.write_bytes(b"{broken\n" + folder.metrics.read_bytes())
    with caplog.at_level(logging.WARNING), MetricsLog(folder, resume_step=2) as metrics:
        metrics.write(3, {"reward": 9.0})
    with RolloutsLog(folder, resume_step=2) as rollouts:
        rollouts.write(3, [make_group("again")])
    assert [(line["step"], line["reward"]) for line in read_lines(folder.metrics)] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert [line["step"] for line in read_lines(folder.rollouts)] == [1, 1, 2, 2, 3, 3]
    assert read_lines(folder.rollouts)[-1]["sample_id"] == "again"
    assert "1 line(s) that were not JSON" in caplog.text
    assert (folder.path / "metrics.jsonl.damaged").read_bytes() == b"{broken\n"
    assert [line["step"] for line in read_lines(folder.path / "metrics.jsonl.abandoned")] == [3, 4]


def test_a_rollout_line_holds_what_a_person_needs(folder: RunFolder) -> None:
    hard = 'quote " newline \n 中文 \u2028 \ud800'
    with RolloutsLog(folder) as log:
        log.write(3, [make_group(texts=(hard, "x"), totals=(1.1, None))])
    with folder.rollouts.open("rb") as file:
        lines = [json.loads(line) for line in file]
    first, second = lines
    assert first["response"] == hard
    assert (first["step"], first["sample_id"], first["rollout"], first["rollouts"]) == (3, "17", 0, 2)
    assert (first["answer"], first["options"], first["finish_reason"]) == ("B", ["A. red", "B. blue"], "stop")
    assert (first["parts"], first["total"]) == ({"accuracy": 1.0, "format": 1.0}, 1.1)
    assert (second["parts"], second["total"]) == ({"accuracy": None, "format": 1.0}, None)
    assert (first["response_tokens"], first["prompt_tokens"]) == (3, 5)
    assert (folder.path / first["thumbnails"]).is_file()


def test_a_reward_that_is_not_finite_is_refused(folder: RunFolder) -> None:
    message = r"rollout 0 of sample '17' in step 3: 'total' is not a finite.*must be None"
    with RolloutsLog(folder) as log, pytest.raises(VlmPgError, match=message):
        log.write(3, [make_group(totals=(float("nan"), 0.0))])


def test_the_same_questions_are_logged_again_whatever_their_order_or_rewards() -> None:
    groups = [make_group(str(index), totals=(index, index)) for index in range(16)]
    chosen = [group.sample.sample_id for group in pick_groups(groups, 2)]
    again = [make_group(str(index), totals=(-index, 0)) for index in reversed(range(16))]
    assert [group.sample.sample_id for group in pick_groups(again, 2)] == chosen
    assert pick_groups(groups, 0) == []


def test_a_strip_is_saved_once_per_question(folder: RunFolder) -> None:
    with RolloutsLog(folder, groups_per_step=9) as log:
        log.write(1, [make_group("a"), make_group("b")])
        log.write(2, [make_group("a")])
    strips = sorted(folder.thumbnails.iterdir())
    assert len(strips) == 2
    with Image.open(strips[0]) as picture:
        assert picture.size == (8 * 112 + 7 * 3, 130)  # 56 px frames at twice their size, and a line of seconds


def test_no_picture_without_a_preview_or_when_switched_off(folder: RunFolder) -> None:
    with RolloutsLog(folder) as log, RolloutsLog(folder, thumbnail_frames=0) as quiet:
        log.write(1, [make_group(frames=0)])
        quiet.write(2, [make_group()])
    assert [line["thumbnails"] for line in read_lines(folder.rollouts)] == [None] * 4
    assert not folder.thumbnails.exists()


def test_a_strip_shows_first_and_last_frame() -> None:
    prompt = make_group(frames=8).prompt
    assert shown_frames(prompt, 3) == [0, 4, 7]
    assert shown_frames(prompt, 1) == [0]
    assert shown_frames(prompt, 20) == list(range(8))
    strip = draw_strip(prompt, 3)
    assert strip.getpixel((56, 56)) == (0, 0, 0)
    assert strip.getpixel((2 * 115 + 56, 56)) == (210, 210, 210)
