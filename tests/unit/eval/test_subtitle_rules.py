"""Which subtitles a protocol shows: each published rule on cues made by hand, at their edges."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_pg.errors import SampleError
from vlm_pg.eval.protocols.protocol import SubtitleRule, load_protocol
from vlm_pg.eval.wording import interleaved, shown_subtitles, wording_of, words
from vlm_pg.prompts.chat import Turn
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import Cue, DecodedMedia, MediaRef, Sample

CUES = (Cue(1.0, 3.0, "one"), Cue(2.5, 4.0, "two"), Cue(4.0, 4.0, "never"), Cue(5.0, 9.0, "three"))


def sample(subtitles: str = "1.srt") -> Sample:
    media = (MediaRef("video", "1.mp4", subtitles=subtitles),)
    return Sample("1", "Who?", media, ("A. x", "B. y"), "A", "multiple_choice", "", "")


@pytest.mark.parametrize(
    "rule,seconds,expected",
    [
        ("none", (2.0,), ""),
        # A frame at the very beginning of a text shows it, one at its end does not.
        ("at_frames", (1.0,), "one"),
        ("at_frames", (3.0,), "two"),
        ("at_frames", (2.75, 2.9, 6.0, 8.0), "one\ntwo\nthree"),
        ("lmms", (1.0,), "one"),
        ("lmms", (9.0,), ""),
        # Strictly inside; the first that covers a frame, so that "one" hides "two" and stands there twice.
        ("kit", (1.0,), ""),
        ("kit", (2.0, 2.75, 3.0, 4.5, 6.0, 7.0), "one\none\ntwo\nthree\nthree"),
        ("qwen3_vl", (1.0, 3.0, 5.0), "two"),
        ("qwen3_vl", (2.0, 2.75, 6.0, 7.0), "one two three"),
    ],
)
def test_a_rule_takes_these(rule: SubtitleRule, seconds: tuple[float, ...], expected: str) -> None:
    assert shown_subtitles(rule, sample(), CUES, seconds) == expected
    # lmms-eval writes that there is no file, not that a file has nothing at these frames.
    assert shown_subtitles(rule, sample(), (), seconds) == ""
    assert shown_subtitles(rule, sample(""), (), seconds) == "No subtitles available" * (rule == "lmms")


SELECT = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter "
    "(A, B, C, or D) of the correct option.\n"
)


@pytest.mark.parametrize(
    "name,expected",
    [
        (
            "video_mme/official_subtitles",
            "This video's subtitles are listed below:\none\ntwo\n" + SELECT + "Who?\nA. x\nB. y\nThe best answer is:",
        ),
        (
            "video_mme/lmms_subtitles",
            "This video's subtitles are listed below: \none\ntwo\n"
            + SELECT.replace("the video.", "the video and the subtitles.")
            + "Who?\nA. x\nB. y\nThe best answer is:",
        ),
        (
            "video_mme/kit_subtitles",
            "\nThese are the frames of a video. This video's subtitles are listed below:\none\n"
            + SELECT
            + "Question: Who?\nA. x\nB. y\nAnswer: ",
        ),
        (
            "video_mme/qwen3_vl_subtitles",
            "This video's subtitles are listed below:\none two\n"
            + SELECT
            + "Question: Who?\nA. x\nB. y\nThe best answer is:",
        ),
    ],
)
def test_subtitles_stand_before_the_question(name: str, expected: str) -> None:
    system = "You are a helpful assistant." if name == "video_mme/lmms_subtitles" else ""
    assert words(load_protocol(name), sample(), CUES, (2.75,)) == (system, expected)
    if name == "video_mme/qwen3_vl_subtitles":  # Without subtitles the heading is left out.
        plain = SELECT + "Question: Who?\nA. x\nB. y\nThe best answer is:"
        assert words(load_protocol(name), sample(""), (), (2.75,)) == ("", plain)


def test_a_builder_gets_the_cues_and_times_of_the_decoded_video() -> None:
    frames = np.zeros((2, 3, 28, 28), np.uint8)
    video = DecodedMedia("video", frames, (2.0, 6.0), 0.25, "pyav", CUES)
    protocol = load_protocol("video_mme/qwen3_vl_subtitles")
    assert wording_of(protocol)(sample(), [video]) == words(protocol, sample(), CUES, (2.0, 6.0))
    assert "listed below:\none three\n" in wording_of(protocol)(sample(), [video])[1]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # Middles are 2, 3.25, 4 and 7; a frame at a middle stands before the text. "never" counts from 3.5 to 4.5.
        ((0.0, 2.0, 3.0, 4.0, 6.0, 8.0), [0, 1, "one\n", 2, "two\n", 3, "never\n", 4, "three\n", 5]),
        # 1 and 3 are the edges of "one", which no frame is inside of.
        ((1.0, 3.0), [0, 1, "two\n"]),
        ((3.5, 4.5, 5.0, 9.0), ["two\n", 0, 1, 2, 3]),
        ((8.0,), ["three\n", 0]),
        ((), []),
    ],
)
def test_frames_and_texts_in_turn(seconds: tuple[float, ...], expected: list[str | int]) -> None:
    assert interleaved(CUES, seconds) == expected


def test_a_protocol_shows_frames_with_texts_between_them_and_then_asks() -> None:
    protocol = load_protocol("longvideobench/interleaved")
    video = DecodedMedia("video", np.zeros((3, 3, 28, 28), np.uint8), (0.0, 2.0, 3.5), 0.5, "pyav", CUES[:1])
    plain = words(load_protocol("longvideobench/official"), sample(), (), ())
    assert wording_of(protocol)(sample(), [video]) == (plain[0], Turn((0, 1, "one\n", 2, plain[1])))
    assert protocol.prompt_settings(PromptSettings(subtitles=False)).subtitles
    for media in ([], [video, video]):
        with pytest.raises(SampleError, match=f"shows the frames of one video .* has {len(media)} media") as got:
            wording_of(protocol)(sample(), media)
        assert got.value.reason == "not_asked"
