"""Bundled protocols load with their published settings; faulty names and files are told what is wrong."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.support.asking import asked, choice
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.eval.protocols.load import load_protocol, protocol_names
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.eval.settings import EvalSettings
from vlm_pg.eval.wording import words
from vlm_pg.media.selection import WHOLE, Timeline, choose
from vlm_pg.media.settings import MediaSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import MediaRef

SETS = {
    "aime2024",
    "amc2023",
    "charades_sta",
    "gsm8k",
    "longvideo_reason",
    "longvideobench",
    "math500",
    "mathvista",
    "mmvu",
    "mvbench",
    "nextqa",
    "tempcompass",
    "video_mme",
    "video_mmmu",
    "vsi_bench",
}


def test_every_set_has_protocols() -> None:
    assert {name.partition("/")[0] for name in protocol_names()} == SETS
    assert {"video_mme/official", "video_mme/official_subtitles", "video_mme/lmms", "video_mme/qwen3_vl"} <= set(
        protocol_names()
    )
    assert {"video_mme/video_r1", "video_mme/qwen2_5_vl"} <= set(protocol_names())


@pytest.mark.parametrize("name", protocol_names())
def test_a_bundled_protocol_goes_with_the_settings_it_changes(name: str) -> None:
    protocol = load_protocol(name)
    assert protocol.name == name
    assert protocol.pipeline
    protocol.media_settings(MediaSettings(workers=0))
    RolloutSettings(**protocol.rollout_changes())


def test_an_answer_that_mvbench_begins_is_read_from_the_bracket_on() -> None:
    protocol = load_protocol("mvbench/official")
    assert (protocol.answer_prefix, protocol.read_prefix) == ("Best option:(", "(")
    assert protocol.as_read("B) a dog") == "(B) a dog"
    assert load_protocol("mvbench/lmms").answer_prefix == ""
    assert load_protocol("mvbench/lmms").as_read("B") == "B"


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


def test_frames_and_sampling_are_the_published_ones() -> None:
    base = MediaSettings(workers=0, frames="uniform", num_frames=8)
    qwen3 = load_protocol("video_mme/qwen3_vl")
    seen = qwen3.media_settings(base)
    assert (seen.frames, seen.num_frames, seen.fps, seen.min_frames, seen.max_frames) == ("fps", None, 2.0, 4, 512)
    assert (seen.min_pixels, seen.max_pixels, seen.workers) == (3584, 401408, 0)
    assert seen.video_tokens is not None
    assert seen.video_tokens * 32 * 32 == 19267584
    sampling = qwen3.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.8, 20, 3407)
    assert (sampling.presence_penalty, qwen3.max_new_tokens) == (1.5, 32768)
    thinking = load_protocol("video_mme/qwen3_vl_thinking")
    assert (thinking.sampling.temperature, thinking.sampling.top_p, thinking.sampling.top_k) == (0.6, 0.95, 20)
    assert (thinking.sampling.seed, thinking.max_new_tokens) == (1234, 40960)
    r1 = load_protocol("vsi_bench/video_r1")
    seen = r1.media_settings(base)
    assert (seen.fps, seen.min_frames, seen.max_frames) == (2.0, 4, 16)
    assert (seen.min_pixels, seen.max_pixels, seen.video_tokens) == (128 * 28 * 28, 256 * 28 * 28, None)
    assert (r1.sampling.temperature, r1.sampling.top_p, r1.max_new_tokens) == (0.1, 0.001, 1024)
    lmms = load_protocol("video_mme/lmms")
    seen = lmms.media_settings(MediaSettings())
    assert (seen.min_frames, seen.most_frames, seen.num_frames, seen.video_tokens) == (32, 32, None, None)
    assert (seen.min_pixels, seen.max_pixels) == (256 * 28 * 28, 1605632)
    # Those that begin with a set's official protocol, too.
    assert {load_protocol(f"{name}/lmms").media["video_tokens"] for name in ("vsi_bench", "tempcompass")} == {None}
    lengths = {"video_mme": 16, "mvbench": 16, "vsi_bench": 16, "video_mmmu": 1024, "mmvu": 1024}
    lengths |= {"longvideobench": 32, "charades_sta": 50}
    assert {name: load_protocol(f"{name}/lmms").max_new_tokens for name in lengths} == lengths
    seen = load_protocol("video_mme/qwen2_5_vl").media_settings(base)
    assert (seen.fps, seen.max_frames, seen.video_tokens) == (2.0, 768, 24576)
    for name, n, temperature, length in (("gsm8k", 1, 0.0, 1024), ("math500", 1, 0.0, 1024), ("amc2023", 4, 0.6, 3072)):
        cppo = load_protocol(f"{name}/cppo")
        assert (cppo.sampling.num_generations, cppo.sampling.temperature, cppo.max_new_tokens) == (
            n,
            temperature,
            length,
        )
    aime = load_protocol("aime2024/cppo").sampling
    assert (aime.num_generations, aime.temperature, aime.top_p) == (4, 0.6, 0.95)
    assert load_protocol("aime2024/lmms").max_new_tokens == 32768


LMMS = [name for name in protocol_names() if "/lmms" in name and not name.startswith("aime")]


@pytest.mark.parametrize("name", LMMS)
@pytest.mark.parametrize("rate", [0.5, 23.976, 60.0])
def test_lmms_eval_shows_32_frames_or_as_many_as_a_shorter_video_has(name: str, rate: float) -> None:
    """By its models/chat/qwen2_5_vl.py, and qwen-vl-utils' linspace over the whole video."""
    settings = load_protocol(name).media_settings(MediaSettings(fps=0.1, min_frames=2, max_frames=4))
    for total in (*range(2, 70), 99, 100, 768, 1001, 1999, 2000):
        line = Timeline.of([place / rate for place in range(total)], Fraction(1, 90_000), rate)
        choice = choose(line, WHOLE, settings, "a.mp4")
        count = max(2, min(32, total) // 2 * 2)
        assert choice.indices == tuple(torch.linspace(0, total - 1, count).round().long().tolist())
        assert choice.sampled_fps == count / total * rate
    with pytest.raises(SampleError, match=r"has 1 frame\(s\)\. At least 2 are needed"):
        choose(Timeline.of([0.0], Fraction(1, 90_000), rate), WHOLE, settings, "a.mp4")


def test_official_frames_and_lengths_are_those_of_the_sets_own_scripts() -> None:
    base = MediaSettings(workers=0)
    tempcompass, mmvu, vsi = (load_protocol(f"{name}/official") for name in ("tempcompass", "mmvu", "vsi_bench"))
    seen = tempcompass.media_settings(base)
    assert (seen.fps, seen.max_pixels, tempcompass.max_new_tokens) == (1.0, 720 * 720, 128)
    seen = mmvu.media_settings(base)
    assert (seen.fps, seen.max_frames, mmvu.max_new_tokens) == (1.0, 64, 1024)
    assert (vsi.max_new_tokens, vsi.sampling.temperature) == (16, 0.0)
    assert load_protocol("mvbench/official").max_new_tokens == 100
    # What Qwen reports on these sets has Qwen's frames and lengths.
    for name in ("tempcompass", "mmvu", "vsi_bench"):
        qwen = load_protocol(f"{name}/qwen2_5_vl")
        seen = qwen.media_settings(base)
        assert (seen.fps, seen.max_frames, seen.max_pixels, qwen.max_new_tokens) == (2.0, 768, 602112, 1024)


@pytest.mark.parametrize("name", ["vsi_bench", "video_mmmu", "mmvu", "mvbench", "tempcompass", "video_mme"])
@pytest.mark.parametrize("frames", [32, 64])
def test_video_r1_reports_more_frames_and_changes_nothing_else(name: str, frames: int) -> None:
    with_16, more = load_protocol(f"{name}/video_r1"), load_protocol(f"{name}/video_r1_{frames}")
    assert more.media == with_16.media | {"max_frames": frames}
    assert f"at most {frames} frames" in more.source
    told = {"name", "source", "media"}
    assert more.model_dump(exclude=told) == with_16.model_dump(exclude=told)


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


def test_what_is_published_and_not_done_is_said() -> None:
    differing = load_protocol("video_mme/qwen3_vl").model_copy(update={"differs": "its judge is not asked"})
    assert differing.not_applied() == ["its judge is not asked"]
    assert load_protocol("video_mme/video_r1").not_applied() == []


def test_a_published_presence_penalty_is_applied_and_that_of_the_configuration_is_not() -> None:
    base = RolloutSettings(presence_penalty=-1.0)
    applied = {
        name: base.model_copy(update=load_protocol(name).rollout_changes()).presence_penalty
        for name in ("video_mme/qwen3_vl", "video_mme/qwen3_vl_thinking", "video_mme/video_r1")
    }
    assert applied == {"video_mme/qwen3_vl": 1.5, "video_mme/qwen3_vl_thinking": 0.0, "video_mme/video_r1": 0.0}


def test_a_question_that_a_protocol_does_not_report_is_not_asked() -> None:
    protocol, yes_no = load_protocol("tempcompass/video_r1"), asked("yes_no", "Is it fast?", task="yes_no")
    assert protocol.includes(choice(task="multi-choice"))
    assert not protocol.includes(yes_no)
    with pytest.raises(SampleError, match=r"has no template for task 'yes_no'. It has multi-choice.") as caught:
        words(protocol, yes_no, (), ())
    assert caught.value.reason == "not_asked"


def test_a_detail_that_the_sample_lacks_is_named() -> None:
    with pytest.raises(
        SampleError, match=r"writes details.sentence .* details have duration.*prepare charades_sta"
    ) as caught:
        words(load_protocol("charades_sta/lmms"), asked("time_span", duration=30), (), ())
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


def test_a_protocol_of_ones_own_is_a_file(tmp_path: Path) -> None:
    protocol = load_protocol(own(tmp_path, OWN))
    assert (protocol.name, protocol.reader, protocol.aggregation) == ("mine", "ours", "mean")
    assert words(protocol, choice(), (), ()) == ("", "Who is seen?")


def test_a_protocol_of_ones_own_may_begin_with_a_bundled_one(tmp_path: Path) -> None:
    protocol = load_protocol(own(tmp_path, "base: video_mme/qwen3_vl\nmedia: {max_frames: 64}\nmax_new_tokens: 9\n"))
    base = load_protocol("video_mme/qwen3_vl")
    assert protocol.media == {**base.media, "max_frames": 64}
    assert (protocol.templates, protocol.max_new_tokens) == (base.templates, 9)


@pytest.mark.parametrize(
    "change,message",
    [
        ('templates: {"*": "{qestion}"}', r"placeholder \{qestion\}.*Did you mean \{question\}"),
        ('templates: {"*": "{whatever}"}', r"Placeholders are \{question\}, .* and \{details.KEY\}"),
        ('templates: {"*": "{details.}"}', r"placeholder \{details.\}"),
        ('templates: {"*": "a { b"}', r"lone '\{'"),
        ('templates: {"*": "[[{options}"}', r"'\[\[' is not ended"),
        ('templates: {"*": "{options}]]"}', r"'\]\]' ends nothing"),
        ('templates: {"*": "[[ [[{options}]]"}', r"stands inside"),
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
