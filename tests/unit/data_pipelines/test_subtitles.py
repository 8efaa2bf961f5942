"""Subtitles that a pipeline writes are read back as the same words at the same times, whatever stands in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipelines.engine.rows import MediaStore, Subtitles, as_vtt
from vlm_pg.media.settings import MediaSettings
from vlm_pg.media.subtitles import read_subtitles
from vlm_pg.types import Cue

TEXTS = [
    "Mind the gap.",
    "a <b>bold</b> claim & <more>",
    "&lt;i&gt; is written so",
    "1984",
    "WEBVTT",
    "NOTE that",
    "00:00:01.000 --> 00:00:02.000",
    "we meet 10:30 -> 11:00",
    "10: 30 → 11 :45",
    "00:00:01,000 00:00:02,000",
    "<v Roger>hello",
]


def test_a_file_holds_times_in_milliseconds_and_escaped_texts() -> None:
    written = as_vtt([Cue(0.0, 1.5, "one\n two"), Cue(3661.0625, 3661.25, "a < b at 10:30")])
    assert written == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none two\n\n01:01:01.062 --> 01:01:01.250\na &lt; b at 10&#58;30\n"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_read_back_as_it_is(text: str, tmp_path: Path) -> None:
    path = MediaStore(tmp_path).write_subtitles(Subtitles((Cue(1.0, 2.0, text), Cue(2.0, 2.5, "end"))))
    assert path is not None and path.startswith("unpacked/") and path.endswith(".vtt")
    cues = read_subtitles(str(tmp_path / path), path, MediaSettings())
    assert cues == (Cue(1.0, 2.0, text), Cue(2.0, 2.5, "end"))


@pytest.mark.parametrize("texts", [(), ("", " \n ")])
def test_where_nothing_is_said_no_file_is_written(texts: tuple[str, ...], tmp_path: Path) -> None:
    told = Subtitles(tuple(Cue(1.0, 2.0, text) for text in texts))
    assert MediaStore(tmp_path).write_subtitles(told) is None and not list(tmp_path.iterdir())


def test_half_of_a_sign_does_not_keep_the_rest_from_being_written(tmp_path: Path) -> None:
    path = MediaStore(tmp_path).write_subtitles(Subtitles((Cue(1.0, 2.0, "so \ud83d it ends"),)))
    assert read_subtitles(str(tmp_path / str(path)), "it", MediaSettings()) == (Cue(1.0, 2.0, "so ? it ends"),)
