"""A prompt that is measured without pixels and weights is the prompt that is built: every token, every position."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.groups import tiny_policy
from tests.support.runs import ROOT, save_tiny_model
from tests.support.tiny import FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.errors import ModelError, SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.loading import WeightlessPolicy, load_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.builder import PromptBuilder, PromptMeasure
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.types import DecodedMedia, MediaRef, Prompt, Sample

SRT = "1\n00:00:01,000 --> 00:00:02,500\nMind the gap.\n\n2\n00:00:07,000 --> 00:00:09,000\n<i>Doors close.</i>\n"
WIDE, TALL = MediaRef("image", "wide.png"), MediaRef("image", "tall.jpg")
WHOLE = MediaRef("video", "nasa_13013.mp4")
CASES: dict[str, tuple[MediaRef, ...]] = {
    "text": (),
    "image": (WIDE,),
    "images": (WIDE, TALL, WIDE),
    "video": (WHOLE,),
    "few frames": (MediaRef("video", "video_90.mov"),),
    "clip with subtitles": (MediaRef("video", "flipping_a_pancake.mkv", start=6.0, end=8.0, subtitles="words.srt"),),
    "moments": (MediaRef("video", "flipping_a_pancake.mkv", times=(0.5, 2.0, 9.0), subtitles="words.srt"),),
    "mixed": (TALL, WHOLE, WIDE, MediaRef("video", "av1_video.mkv", start=1.0)),
}
BUDGETED = {"max_frames": 12, "max_pixels": 40 * 784, "video_tokens": 9}


def pairs_of(cases: Iterable[str]) -> list[Any]:
    """Every family with every case; usually one family with all, and the others with one."""
    return [
        pytest.param(family, case, marks=() if family == "qwen3_vl" or case == "mixed" else pytest.mark.matrix)
        for family in VL_FAMILY_NAMES
        for case in cases
    ]


def sample(refs: tuple[MediaRef, ...], question: str = "What is said?") -> Sample:
    return Sample("7", question, refs, ("A. red", "B. blue"), "A", "multiple_choice", "s", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0).integers(0, 256, (150, 410, 3), dtype=np.uint8)
    Image.fromarray(noise).save(found / "wide.png")
    Image.fromarray(noise.transpose(1, 0, 2)).save(found / "tall.jpg")
    (found / "words.srt").write_text(SRT)
    return found


@pytest.fixture
def root(folder: Path, media_dir: Path) -> Path:
    for name in {ref.path for refs in CASES.values() for ref in refs}:
        if not (folder / name).exists():
            (folder / name).write_bytes((media_dir / name).read_bytes())
    return folder


@lru_cache(maxsize=64)
def looked_at(
    root: Path, factor: int, refs: tuple[MediaRef, ...], subtitles: bool = True
) -> tuple[list[DecodedMedia], list[MediaFacts]]:
    """Once for all families that resize alike."""
    settings = MediaSettings(workers=0, image_max_pixels=100 * 784, **BUDGETED)
    with MediaLoader(settings, root, factor=factor, subtitles=subtitles) as loader:
        media, probes = loader.load(refs), [loader.probe(ref) for ref in refs]
    facts = [one.result() for one in probes if isinstance(one, Future)]
    decoded = [one for one in media if isinstance(one, DecodedMedia)]
    assert len(facts) == len(decoded) == len(refs)
    return decoded, facts


def assert_equal(measured: Prompt, built: Prompt) -> None:
    assert measured.num_tokens == built.num_tokens and measured.num_visual_tokens == built.num_visual_tokens
    assert torch.equal(measured.input_ids, built.input_ids)
    assert torch.equal(measured.mm_token_type_ids, built.mm_token_type_ids)
    assert torch.equal(measured.positions_3P, built.positions_3P)
    assert measured.next_position == built.next_position
    assert (measured.text, measured.subtitles) == (built.text, built.subtitles)
    assert (measured.grid_thw is None) == (built.grid_thw is None)
    if measured.grid_thw is not None and built.grid_thw is not None:
        assert torch.equal(measured.grid_thw, built.grid_thw) and measured.media_kinds == built.media_kinds
    assert measured.pixel_values is None or measured.pixel_values.numel() == 0


@pytest.mark.parametrize(("family", "case"), pairs_of([case for case, refs in CASES.items() if refs]))
def test_questions_on_the_same_media_have_one_tensor_of_pixels(family: str, case: str, root: Path) -> None:
    """The second prompt is the one that a builder makes which has not seen the first, and holds the first's pixels."""
    policy = tiny_policy(family=family)
    media, _ = looked_at(root, policy.pixel_factor, CASES[case])
    parts: Any = (policy.processor, PromptSettings(), policy.positions)
    builder, other = PromptBuilder(*parts), sample(CASES[case], "What is written on the wall?")
    first = builder.build(sample(CASES[case]), media)
    second, alone = builder.build(other, media), PromptBuilder(*parts).build(other, media)
    assert second.pixel_values is first.pixel_values
    assert alone.pixel_values is not None and torch.equal(second.pixel_values, alone.pixel_values)  # type: ignore[arg-type]
    assert (second.content_key, second.media_keys) == (alone.content_key, alone.media_keys)
    assert_equal(replace(second, pixel_values=None), alone)
    assert second.preview_seconds == alone.preview_seconds


def test_pixels_of_equal_but_other_media_and_of_prompts_that_are_gone_are_made_anew(root: Path) -> None:
    policy = tiny_policy()
    media, _ = looked_at(root, policy.pixel_factor, CASES["video"])
    builder = PromptBuilder(policy.processor, PromptSettings(), policy.positions)
    first = builder.build(sample(CASES["video"]), media)
    dark = [replace(media[0], frames=media[0].frames * 0)]
    darker = builder.build(sample(CASES["video"]), dark)
    assert darker.content_key != first.content_key and darker.pixel_values is not first.pixel_values
    assert builder.build(sample(CASES["video"]), media).pixel_values is not first.pixel_values
    pixels = weakref.ref(first)
    del first
    assert pixels() is None  # the builder holds no prompt
    assert builder.build(sample(CASES["video"]), media).content_key != darker.content_key


@pytest.mark.parametrize(("family", "case"), pairs_of(CASES))
def test_measured_is_built(family: str, case: str, root: Path) -> None:
    policy = tiny_policy(family=family)
    media, facts = looked_at(root, policy.pixel_factor, CASES[case])
    parts: Any = (policy.processor, PromptSettings(), policy.positions)
    built = PromptBuilder(*parts).build(sample(CASES[case]), media)
    assert_equal(PromptMeasure(*parts).measure(sample(CASES[case]), facts), built)
    assert ("Mind the gap." in built.text) == (case == "moments")  # what is said at 2.0 s; the clip begins at 6 s
    assert ("Doors close." in built.text) == (case == "clip with subtitles")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_folder_without_weights_answers_as_its_policy(family: str, root: Path, tmp_path: Path) -> None:
    policy = tiny_policy(family=family)
    policy.model.config.save_pretrained(tmp_path)
    policy.processor.save_pretrained(tmp_path)
    model = WeightlessPolicy(ModelSettings(path=str(tmp_path)))
    assert not list(tmp_path.glob("*.safetensors")) and model.pixel_factor == policy.pixel_factor
    case = CASES["mixed" if policy.family.reads_media else "text"]
    media, facts = looked_at(root, policy.pixel_factor, case)
    built = PromptBuilder(policy.processor, PromptSettings(), policy.positions).build(sample(case), media)
    measured = PromptMeasure(model.processor, PromptSettings(), model.positions).measure(sample(case), facts)
    assert_equal(measured, built)
    limit = policy.model.config.get_text_config().max_position_embeddings
    fits = limit - built.next_position
    for check in (model.check_length, policy.check_length):
        check(measured, fits)
        with pytest.raises(SampleError, match="reaches position") as fault:
            check(measured, fits + 1)
        assert fault.value.reason == "too_long_for_model"


@pytest.mark.parametrize("rule", ["qwen", "transformers"])
def test_positions_by_either_rule(rule: Any, root: Path) -> None:
    settings = ModelSettings(path=str(ROOT / "assets/tiny-qwen2_5-vl"), positions=rule)
    policy, model = load_policy(settings.path, device="cpu", settings=settings), WeightlessPolicy(settings)
    media, facts = looked_at(root, policy.pixel_factor, CASES["mixed"])
    built = PromptBuilder(policy.processor, PromptSettings(), policy.positions).build(sample(CASES["mixed"]), media)
    measured = PromptMeasure(model.processor, PromptSettings(), model.positions).measure(sample(CASES["mixed"]), facts)
    assert_equal(measured, built)


@pytest.mark.parametrize("ends", [None, [3, 5]], ids=["no file", "a file"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2"])
def test_what_is_known_without_weights_is_what_the_policy_says(
    family: str, ends: list[int] | None, tmp_path: Path
) -> None:
    """What asking a server needs: ends of answers, what may not be in one, the vocabulary, how pixels are read."""
    folder = save_tiny_model(tmp_path / "model", family)
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if ends is not None:
        file.write_text(json.dumps({"eos_token_id": ends}))
    settings = ModelSettings(path=str(folder), train=("language",))
    policy, model = load_policy(settings.path, device="cpu", settings=settings), WeightlessPolicy(settings)
    assert stop_token_ids(model) == stop_token_ids(policy)
    assert ends is None or set(ends) < set(stop_token_ids(model))
    assert (model.media_token_ids, model.vocab_size) == (policy.media_token_ids, policy.vocab_size)
    assert (model.pixels, model.pixel_factor) == (policy.pixels, policy.pixel_factor)
    assert model.tokenizer.get_vocab() == policy.tokenizer.get_vocab()


def test_too_long_is_refused_in_the_words_of_the_builder(root: Path) -> None:
    policy = tiny_policy()
    for case, question, subtitles in (("video", "What?", True), ("text", "What? " * 40, True), ("moments", "?", True)):
        one = sample(CASES[case], question)
        media, facts = looked_at(root, policy.pixel_factor, CASES[case], subtitles)
        limit = PromptBuilder(policy.processor, PromptSettings(), policy.positions).build(one, media).num_tokens - 1
        parts: Any = (policy.processor, PromptSettings(max_prompt_tokens=limit), policy.positions)
        with pytest.raises(SampleError) as expected:
            PromptBuilder(*parts).build(one, media)
        measure = PromptMeasure(*parts)
        prompt = measure.measure(one, facts)
        with pytest.raises(SampleError) as found:
            measure.check(prompt)
        assert str(found.value) == str(expected.value) and found.value.reason == "prompt_too_long"


def test_media_for_a_text_model_and_a_folder_without_a_processor_are_refused(root: Path, tmp_path: Path) -> None:
    policy = tiny_policy(family="qwen3")
    _, facts = looked_at(root, 28, CASES["image"])
    with pytest.raises(ModelError, match="reads text alone"):
        PromptMeasure(policy.processor, PromptSettings(), policy.positions).measure(sample(CASES["image"]), facts)
    tiny_policy(family="qwen2_5_vl").model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its processor could not be loaded"):
        WeightlessPolicy(ModelSettings(path=str(tmp_path)))
