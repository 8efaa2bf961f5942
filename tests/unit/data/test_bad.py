"""Faults are written once, at once, and stop the run at a stated share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_pg.data.bad import BadSampleLog, line_of
from vlm_pg.errors import ConfigError, TooManyBadSamples
from vlm_pg.types import BadSample


def bad(number: int, reason: str = "corrupt_media") -> BadSample:
    return BadSample(str(number), reason, "why", f"a.json:{number}")


def test_faults_are_written_at_once_and_once_and_new_ones_warn(tmp_path: Path) -> None:
    file, warnings = tmp_path / "run" / "bad_samples.jsonl", list[str]()
    log = BadSampleLog(file, 0.5, 20, warnings.append)
    assert not file.exists()
    log.record_tried(3, [bad(1), bad(1), bad(2, "missing_media")])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"sample_id": "1", "reason": "corrupt_media", "message": "why", "where": "a.json:1"},
        {"sample_id": "2", "reason": "missing_media", "message": "why", "where": "a.json:2"},
    ]
    assert warnings == [str(bad(1)), str(bad(2, "missing_media"))]
    resumed = BadSampleLog(file, 0.5, 20)
    resumed.record_tried(2, [bad(1), bad(3)])
    assert len(file.read_text().splitlines()) == 3
    assert resumed.counts == {"corrupt_media": 2, "missing_media": 1}


def test_a_line_cut_off_by_a_kill_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "bad_samples.jsonl"
    BadSampleLog(file, 1, 1).record_tried(1, [bad(1)])
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])
    log = BadSampleLog(file, 1, 1)
    assert file.read_bytes() == whole
    log.record_tried(1, [bad(2)])
    assert [json.loads(line)["sample_id"] for line in file.read_text().splitlines()] == ["1", "2"]


def test_faults_that_are_not_unicode_are_read_back_equal(tmp_path: Path) -> None:
    half, file = "\ud83d", tmp_path / "bad.jsonl"
    fault = BadSample(f"id{half}", "corrupt_media", f"caf\udce9{half}", f"{half}.jsonl:1", trace="Traceback ...")
    for _ in range(2):
        BadSampleLog(file, 1, 1).record_tried(1, [fault])
    assert BadSample(**json.loads(file.read_text("utf-8"))) == fault
    assert b"trace" not in line_of(bad(1))


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad_samples.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=r":1 is not a record of a bad sample: .* is expected\. Move the file away"):
        BadSampleLog(file, 1, 1)


def test_a_share_above_the_limit_stops_the_run(tmp_path: Path) -> None:
    log = BadSampleLog(tmp_path / "bad.jsonl", 0.5, 20)
    log.record_tried(19, [bad(number) for number in range(12)])  # 12 of 19, but too few seen to judge
    log.record_tried(5, [])
    with pytest.raises(
        TooManyBadSamples, match=r"13 of 24 .*\(corrupt_media: 12, remote_media: 1\)\. At most a share of 0\.5 .*raise"
    ):
        log.record_tried(0, [bad(99, "remote_media")])


def test_a_file_of_records_is_judged_by_itself(tmp_path: Path) -> None:
    """Some bad records among many do not stop a run, and good records do not dilute faults found later."""
    log = BadSampleLog(tmp_path / "bad.jsonl", 0.5, 20)
    log.record_file([bad(number) for number in range(25)], total=525)
    log.record_tried(20, [bad(number) for number in range(100, 110)])  # exactly the share
    with pytest.raises(TooManyBadSamples, match="11 of 20 samples"):
        log.record_tried(0, [bad(110)])
    with pytest.raises(TooManyBadSamples, match="30 of 40 samples could not be used"):
        BadSampleLog(tmp_path / "other.jsonl", 0.5, 20).record_file([bad(n) for n in range(30)], total=40)
