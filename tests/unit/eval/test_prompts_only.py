"""Prompts are written without a model's weights: the words, frames and settings that an evaluation would ask with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.frame_folders import coloured, write_folder
from vlm_pg.config import RunConfig, load_config
from vlm_pg.errors import ConfigError
from vlm_pg.eval.prompts_only import write_prompts

REPO_ROOT = Path(__file__).parents[3]
RECORD = {
    "problem_id": "1",
    "problem": "Which frame is last?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. 8", "B. 9"],
    "solution": "<answer>B</answer>",
    "path": "h265_video.mp4",
}


def config_of(
    folder: Path, media: Path, records: list[dict[str, Any]], protocol: str | None, **eval_settings: Any
) -> RunConfig:
    (folder / "records.json").write_text(json.dumps(records))
    protocols = {} if protocol is None else {"protocols": {"mine": protocol}}
    run = {
        "model": {"path": str(REPO_ROOT / "assets" / "tiny-qwen2_5-vl")},
        "data": {"eval": {"mine": str(folder / "records.json")}, "media_root": str(media)},
        "media": {"workers": 0},
        "prompt": {"instructions": {"multiple_choice": "One letter."}, "system": "Hi."},
        "training": {"steps": 1},
        "eval": {**protocols, **eval_settings},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return load_config(folder / "run.yaml")


def rows_of(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    written = write_prompts(config, folder / "out")["mine"]
    assert written.path == folder / "out" / "prompts_mine.jsonl"
    return [json.loads(line) for line in written.path.read_text().splitlines()]


def test_a_line_has_words_frames_and_settings(tmp_path: Path, media_dir: Path) -> None:
    """10 frames at 10 a second: Video-R1 shows its least, 4, evenly; 128 x 128 grows to multiples of 28."""
    [row] = rows_of(config_of(tmp_path, media_dir, [RECORD], "video_mme/video_r1"), tmp_path)
    assert (row["id"], row["system"], row["answer_prefix"]) == ("1", "", "")
    assert row["user"].startswith("Which frame is last?Options:\nA. 8\nB. 9\n\nPlease think about this question as if")
    [medium] = row["media"]
    assert (medium["kind"], medium["path"]) == ("video", "h265_video.mp4")
    assert medium["file"] == str((media_dir / "h265_video.mp4").resolve())
    assert medium["frame_seconds"] == [0.0, 0.3, 0.6, 0.9] and "folder_fps" not in medium
    # 128 * sqrt(100,352 / 16,384) = 316.8, and the next multiple of 28 is 336.
    assert (medium["height"], medium["width"]) == (336, 336)
    settings = row["settings"]
    assert (settings["protocol"], settings["reader"]) == ("video_mme/video_r1", "video_mme/video_r1")
    assert (settings["max_new_tokens"], settings["sampling"]["top_p"]) == (1024, 0.001)
    assert (settings["media"]["max_frames"], settings["media"]["max_pixels"]) == (16, 200704)


def test_a_clip_is_shown_as_the_protocol_has_it(tmp_path: Path, media_dir: Path) -> None:
    """10 frames a second: frames 4 to 9 are the clip, of which 4 evenly are 4, 6, 7, 9; Video-R1 shows it whole."""
    clip = RECORD | {"start": 0.4, "end": 0.9}
    [row] = rows_of(config_of(tmp_path, media_dir, [clip], "mvbench/qwen2_5_vl"), tmp_path)
    assert row["media"][0]["frame_seconds"] == pytest.approx([0.4, 0.6, 0.7, 0.9])
    [row] = rows_of(config_of(tmp_path, media_dir, [clip], "mvbench/video_r1"), tmp_path)
    assert row["media"][0]["frame_seconds"] == pytest.approx([0.0, 0.3, 0.6, 0.9])


def test_a_folder_of_pictures_tells_how_fast_it_is_shown(tmp_path: Path) -> None:
    """8 pictures, four a second: 2 s of which the least, 4, are shown, at the times of pictures 0, 2, 5 and 7."""
    write_folder(tmp_path / "media" / "a", [coloured(number) for number in range(8)])
    record = RECORD | {"path": "a", "folder_fps": 4}
    [row] = rows_of(config_of(tmp_path, tmp_path / "media", [record], "video_mme/video_r1"), tmp_path)
    [medium] = row["media"]
    assert (medium["kind"], medium["folder_fps"]) == ("video", 4.0)
    assert medium["file"] == str(tmp_path / "media" / "a")
    assert medium["frame_seconds"] == [0.0, 0.5, 1.25, 1.75]


def test_a_turn_of_frames_and_texts_is_a_list(tmp_path: Path) -> None:
    """8 pictures, two a second: 4 at a frame a second, at 0, 1, 2.5 and 3.5 s; the text's middle is at 1.2 s."""
    write_folder(tmp_path / "media" / "a", [coloured(number) for number in range(8)])
    (tmp_path / "media" / "a.srt").write_text("1\n00:00:00,400 --> 00:00:02,000\nMind the gap.\n")
    record = RECORD | {"path": "a", "folder_fps": 2, "subtitles": "a.srt"}
    [row] = rows_of(config_of(tmp_path, tmp_path / "media", [record], "longvideobench/interleaved"), tmp_path)
    assert row["media"][0]["frame_seconds"] == [0.0, 1.0, 2.5, 3.5]
    assert row["user"][:5] == [0, 1, "Mind the gap.\n", 2, 3] and row["user"][5].startswith("Question: Which frame is")
    assert row["settings"]["media"]["video_tokens"] == 12288


@pytest.mark.parametrize("protocol", [None, "video_mme/qwen3_vl"])
def test_media_among_the_words_make_a_list_too(tmp_path: Path, media_dir: Path, protocol: str | None) -> None:
    record = RECORD | {"problem": "Which frame of <video> is last?"}
    [row] = rows_of(config_of(tmp_path, media_dir, [record], protocol), tmp_path)
    before, medium, behind = row["user"]
    assert before.endswith("Which frame of ") and medium == {"medium": 0} and behind.startswith(" is last?\nA. 8\nB. 9")
    if (
        protocol is None
    ):  # Half a second apart would be 2 frames; media.min_frames is 4, and sizes are near 128 already.
        assert (row["system"], row["settings"]["protocol"], behind) == (
            "Hi.",
            None,
            " is last?\nA. 8\nB. 9\nOne letter.",
        )
        [shown] = row["media"]
        assert (len(shown["frame_seconds"]), shown["height"], shown["width"]) == (4, 140, 140)


def test_faults_have_a_line_and_questions_that_are_not_asked_none(tmp_path: Path, media_dir: Path) -> None:
    details = {"task": "multi-choice"}
    records = [
        RECORD | {"problem_id": "gone", "path": "gone.mp4", "details": details},
        RECORD | {"problem_id": "yes", "details": {"task": "yes_no"}},
        RECORD | {"problem_id": "good", "details": details},
        {"problem_id": "unreadable"},
    ]
    config = config_of(tmp_path, media_dir, records, "tempcompass/video_r1")
    written = write_prompts(config, tmp_path / "out")["mine"]
    assert (written.asked, written.not_asked, written.faults, written.unreadable) == (2, 1, 1, 1)
    gone, good = (json.loads(line) for line in written.path.read_text().splitlines())
    assert (gone["id"], gone["fault"]["reason"]) == ("gone", "missing_media")
    assert "user" not in gone
    assert good["id"] == "good"
    assert good["media"][0]["frame_seconds"] == [0.0, 0.3, 0.6, 0.9]


def test_questions_without_media_ask_for_no_model_at_all(tmp_path: Path) -> None:
    record = {"problem_id": "1", "problem": "1 + 1?", "data_type": "text", "problem_type": "mathematics"}
    records = [record | {"solution": "<answer>2</answer>", "problem_id": str(number)} for number in (1, 2)]
    config = config_of(tmp_path, tmp_path, records, "aime2024/cppo", limit=1)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "/nowhere"})})
    [row] = rows_of(config, tmp_path)
    assert (row["user"], row["media"]) == ("1 + 1?", [])
    assert row["system"].startswith("A conversation between User and Assistant.")
    assert row["settings"]["sampling"]["num_generations"] == 4


def test_sets_that_are_refused_leave_no_folder(tmp_path: Path, media_dir: Path) -> None:
    config = config_of(tmp_path, media_dir, [RECORD], None)
    [records] = config.data.eval.values()
    for sets, message in (
        ({}, r"names no evaluation sets. Add them as data.eval.NAME=PATH"),
        ({"a b": records, "a_b": records}, "The prompts of 'a b', 'a_b' would have one file"),
    ):
        changed = config.model_copy(update={"data": config.data.model_copy(update={"eval": sets})})
        with pytest.raises(ConfigError, match=message):
            write_prompts(changed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
