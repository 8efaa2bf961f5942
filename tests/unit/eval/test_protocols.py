"""Bundled protocols load with their published settings; faulty names and files are excluded what is wrong."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.support.asking import choice, question_of
from vlm_pg.answers.published import PUBLISHED
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.eval.aggregation import AGGREGATIONS
from vlm_pg.eval.protocols.protocol import Protocol, load_protocol, protocol_names
from vlm_pg.eval.settings import EvalSettings
from vlm_pg.eval.wording import words
from vlm_pg.media.sampling import WHOLE, Timeline, choose
from vlm_pg.media.settings import MediaSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import MediaRef


@pytest.mark.parametrize("name", protocol_names())
def test_a_bundled_protocol_loads_and_what_it_names_exists(name: str) -> None:
    protocol = load_protocol(name)
    assert protocol.name == name
    assert protocol.aggregation in AGGREGATIONS
    assert protocol.reader == "ours" or protocol.reader in PUBLISHED
    assert import_module(f"data_pipelines.{protocol.pipeline}").main
    protocol.media_settings(MediaSettings(workers=0))
    RolloutSettings(**protocol.rollout_changes())


def test_video_r1_shows_mvbench_whole_videos_where_others_show_clips() -> None:
    media = (MediaRef("video", "1.mp4", start=2.0, end=5.5, subtitles="1.srt"), MediaRef("image", "2.png"))
    of_a_clip = replace(choice(), media=media)
    whole = load_protocol("mvbench/video_r1").with_shown_media(of_a_clip)
    assert whole.media == (MediaRef("video", "1.mp4", subtitles="1.srt"), MediaRef("image", "2.png"))
    assert replace(whole, media=media) == of_a_clip
    not_cut = choice()
    assert load_protocol("mvbench/video_r1").with_shown_media(not_cut) is not_cut
    assert {name for name in protocol_names() if not load_protocol(name).clips} == {
        f"mvbench/video_r1{frames}" for frames in ("", "_32", "_64")
    }
    assert load_protocol("mvbench/official").with_shown_media(of_a_clip) is of_a_clip


def test_frames_and_sampling_are_those_of_the_protocol_and_not_of_the_configuration() -> None:
    base = MediaSettings(workers=0, frames="uniform", num_frames=8)
    qwen3 = load_protocol("video_mme/qwen3_vl")
    seen = qwen3.media_settings(base)
    assert (seen.frames, seen.num_frames, seen.fps, seen.min_frames, seen.max_frames) == ("fps", None, 2.0, 4, 512)
    assert (seen.min_pixels, seen.max_pixels, seen.workers) == (3584, 401408, 0)
    assert seen.video_tokens is not None and seen.video_tokens * 32 * 32 == 19267584
    sampling = qwen3.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.8, 20, 3407)
    thinking = load_protocol("video_mme/qwen3_vl_thinking")
    assert (thinking.sampling.temperature, thinking.sampling.top_p, thinking.max_new_tokens) == (0.6, 0.95, 40960)
    # A presence penalty of the configuration is replaced, also by none.
    of_run = RolloutSettings(presence_penalty=-1.0)
    penalties = [of_run.model_copy(update=one.rollout_changes()).presence_penalty for one in (qwen3, thinking)]
    assert penalties == [1.5, 0.0]
    # A limit that is switched off again, also behind a base that has one.
    assert {load_protocol(f"{name}/lmms").media["video_tokens"] for name in ("vsi_bench", "tempcompass")} == {None}
    # What Qwen reports on sets whose own scripts have other frames and lengths.
    for name, length in (("tempcompass", 128), ("mmvu", 1024), ("vsi_bench", 16)):
        assert load_protocol(f"{name}/official").max_new_tokens == length
        qwen = load_protocol(f"{name}/qwen2_5_vl")
        seen = qwen.media_settings(base)
        assert (seen.fps, seen.max_frames, seen.max_pixels, qwen.max_new_tokens) == (2.0, 768, 602112, 1024)


LMMS = [name for name in protocol_names() if "/lmms" in name and not name.startswith("aime")]


@pytest.mark.parametrize("name", LMMS)
@pytest.mark.parametrize("rate", [23.976, *(pytest.param(rate, marks=pytest.mark.matrix) for rate in (0.5, 60.0))])
def test_lmms_eval_shows_32_frames_or_as_many_as_a_shorter_video_has(name: str, rate: float) -> None:
    """By its models/chat/qwen2_5_vl.py, and qwen-vl-utils' linspace over the whole video."""
    settings = load_protocol(name).media_settings(MediaSettings(fps=0.1, min_frames=2, max_frames=4))
    for total in (*range(2, 70), 99, 100, 768, 1001, 1999, 2000):
        line = Timeline.of([index / rate for index in range(total)], Fraction(1, 90_000), rate)
        choice = choose(line, WHOLE, settings, "a.mp4")
        count = max(2, min(32, total) // 2 * 2)
        assert choice.indices == tuple(torch.linspace(0, total - 1, count).round().long().tolist())
        assert choice.sampled_fps == count / total * rate
    with pytest.raises(SampleError, match=r"has 1 frame\(s\)\. At least 2 are needed"):
        choose(Timeline.of([0.0], Fraction(1, 90_000), rate), WHOLE, settings, "a.mp4")


@pytest.mark.parametrize("name", ["vsi_bench", "video_mmmu", "mmvu", "mvbench", "tempcompass", "video_mme"])
@pytest.mark.parametrize("frames", [32, 64])
def test_video_r1_reports_more_frames_and_changes_nothing_else(name: str, frames: int) -> None:
    with_16, more = load_protocol(f"{name}/video_r1"), load_protocol(f"{name}/video_r1_{frames}")
    assert more.media == with_16.media | {"max_frames": frames}
    assert f"at most {frames} frames" in more.source
    excluded = {"name", "source", "media"}
    assert more.model_dump(exclude=excluded) == with_16.model_dump(exclude=excluded)


def test_what_a_variant_differs_in_besides_stands_behind_what_its_base_does(tmp_path: Path) -> None:
    shared = load_protocol("video_mme/lmms").differs
    assert shared.startswith("Frames are those of lmms-eval's chat models, its default.")
    assert load_protocol("video_mme/lmms_subtitles").differs.startswith(f"{shared} lmms-eval takes only subtitles")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: video_mme/lmms\ndiffers_also: One thing.\n")
    assert load_protocol(str(mine)).differs == f"{shared} One thing."
    mine.write_text("base: math500/cppo\ndiffers_also: One thing.\n")
    assert load_protocol(str(mine)).differs == "One thing."
    mine.write_text("base: math500/cppo\ndiffers_also: [1]\n")
    with pytest.raises(ConfigError, match="differs_also"):
        load_protocol(str(mine))


def test_a_question_that_a_protocol_does_not_report_is_not_asked() -> None:
    protocol, yes_no = load_protocol("tempcompass/video_r1"), question_of("yes_no", "Is it fast?", task="yes_no")
    assert protocol.includes(choice(task="multi-choice"))
    assert not protocol.includes(yes_no)
    with pytest.raises(SampleError, match=r"has no template for task 'yes_no'. It has multi-choice.") as caught:
        words(protocol, yes_no, (), ())
    assert caught.value.reason == "not_asked"


def test_a_detail_that_the_sample_lacks_is_named() -> None:
    with pytest.raises(
        SampleError, match=r"writes details.sentence .* details have duration.*prepare charades_sta"
    ) as caught:
        words(load_protocol("charades_sta/lmms"), question_of("time_span", duration=30), (), ())
    assert caught.value.reason == "lacks_detail"


@pytest.mark.parametrize(
    "name,message",
    [
        ("video_mme/lms", "Did you mean .*video_mme/lmms"),
        ("video_mme", "Of this set there are video_mme/official, .*video_mme/video_r1"),
        ("vidio_mme/official", "Did you mean video_mme/official"),
        ("qqqq", "Sets: aime2024, amc2023, .*vsi_bench"),
        ("shared/video_r1", "There is no protocol 'shared/video_r1'"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_protocol(name)


def test_a_set_of_the_configuration_has_the_protocol_it_names() -> None:
    settings = EvalSettings(protocols={"mine": "video_mme/lmms"})
    assert settings.protocol_of("mine") is load_protocol("video_mme/lmms")
    assert settings.protocol_of("other") is None
    with pytest.raises(ValidationError, match=r"no protocol 'video_mme/lms'.*Did you mean video_mme/lmms"):
        EvalSettings(protocols={"mine": "video_mme/lms"})


OWN = 'source: "mine"\nmax_new_tokens: 8\ntemplates: {"*": "{question}"}\n'


def own(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_protocol_of_ones_own_may_begin_with_a_bundled_one(tmp_path: Path) -> None:
    protocol = load_protocol(own(tmp_path, "base: video_mme/qwen3_vl\nmedia: {max_frames: 64}\nmax_new_tokens: 9\n"))
    base = load_protocol("video_mme/qwen3_vl")
    assert (protocol.name, protocol.media) == ("mine", {**base.media, "max_frames": 64})
    assert (protocol.templates, protocol.max_new_tokens) == (base.templates, 9)


@pytest.mark.parametrize(
    "change,message",
    [
        ('templates: {"*": "{qestion}"}', r"placeholder \{qestion\}.*Did you mean \{question\}"),
        ('templates: {"*": "{whatever}"}', r"Placeholders are \{question\}, .* and \{details.KEY\}"),
        ('templates: {"*": "{details.}"}', r"placeholder \{details.\}"),
        ('templates: {"*": "a { b"}', r"a lone brace \(.*Write '\{\{'"),
        ('templates: {"*": "{question!r} {options:3}"}', r"placeholder \{question!r\}"),
        ('templates: {"*": "[[{options}"}', r"'\[\[' and '\]\]' do not follow"),
        ('templates: {"*": "{options}]]"}', r"do not follow each other in pairs"),
        ('templates: {"*": "[[ [[{options}]]"}', r"not within each other"),
        ('templates: {"a/b": "{question}"}', r"template_by is answer_kind"),
        ('templates: {"*": "{question}<|im_end|>"}', r"control token '<\|im_end\|>'"),
        ("subtitles: kit", r"subtitles is kit and no template has \{subtitles\}"),
        ('templates: {"*": "{subtitles}"}', r"subtitles is none and a template has \{subtitles\}"),
        ("media: {workers: 2}", r"media has workers. A protocol may set frames, fps"),
        ("media: {min_pixels: 90000000}", r"must not exceed the largest"),
        ("sampling: {num_generations: 4}", r"greedy answers are all alike"),
        ("answer_prefix: 'So: ('\nread_prefix: '['", r"no end of answer_prefix"),
        ("max_tokens: 5", r"max_tokens .* is not a known setting"),
        ("base: video_mme/lms", r"'base' of a protocol cannot be used.*Did you mean"),
        ("variants: {}", r"has 'variants'. The settings of one protocol are expected"),
    ],
)
def test_a_faulty_file_is_told_what_is_wrong(tmp_path: Path, change: str, message: str) -> None:
    text = OWN.replace('templates: {"*": "{question}"}\n', "") if change.startswith("templates") else OWN
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_protocol(own(tmp_path, f"{text}{change}\n"))


def test_braces_and_parts_that_may_be_left_out() -> None:
    protocol = Protocol(
        name="mine",
        source="mine",
        max_new_tokens=1,
        templates={"*": "{{x}}[[ ({details.unit}, {details.place})]] {details.n} {details.list}"},
    )
    sample = choice(unit="m", place="", n=3.0, list=[1, "a"])
    assert words(protocol, sample, (), ())[1] == '{x} 3 [1, "a"]'
    sample = choice(unit="m", place="here", n=0.5, list=None)
    assert words(protocol, sample, (), ())[1] == "{x} (m, here) 0.5 "
