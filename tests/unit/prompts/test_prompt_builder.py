"""Prompts equal what transformers and qwen-vl-utils make of the same files: tokens, grids, pixels, positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.support.groups import tiny_policy
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.errors import ModelError, SampleError
from vlm_pg.media.decode_file import decode_file
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.loading import make_policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.prompts.settings import DEFAULT_INSTRUCTIONS, PromptSettings
from vlm_pg.types import DecodedMedia, MediaRef, Sample


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def ones(input_ids, types, grid_thw, kinds, seconds):
    return torch.arange(len(input_ids)).expand(3, -1)


def own_positions(model):
    """transformers' own positions, for media in any order."""

    def positions(input_ids, types, grid_thw, kinds, seconds):
        if grid_thw is None:
            return torch.arange(len(input_ids)).expand(3, -1)
        images = [grid for grid, kind in zip(grid_thw, kinds, strict=True) if kind == "image"]
        videos = [grid for grid, kind in zip(grid_thw, kinds, strict=True) if kind == "video"]
        return model.model.get_rope_index(
            input_ids[None],
            types[None],
            torch.stack(images) if images else None,
            torch.stack(videos) if videos else None,
            list(seconds),
        )[0][:, 0]

    return positions


def sample_for(media, **changes) -> Sample:
    refs = tuple(MediaRef(item.kind, f"{index}.x") for index, item in enumerate(media))
    sample = Sample("7", "Which colour is first?", refs, ("A. red", "B. blue"), "B", "multiple_choice", "s", "c")
    return replace(sample, **changes)


def video(frames: int = 4, height: int = 56, width: int = 84, fps: float = 2.0, seed: int = 0) -> DecodedMedia:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 3, height, width), dtype=np.uint8)
    return DecodedMedia("video", pixels, tuple(index / fps for index in range(frames)), fps, "pyav")


def image(height: int = 56, width: int = 56, seed: int = 9) -> DecodedMedia:
    pixels = np.random.default_rng(seed).integers(0, 256, (1, 3, height, width), dtype=np.uint8)
    return DecodedMedia("image", pixels, (0.0,), 0.0, "pillow")


@pytest.mark.parametrize(
    "name",
    ["flipping_a_pancake.mkv", "h264_10bits.mp4"]
    + [pytest.param(name, marks=pytest.mark.matrix) for name in ("nasa_13013.mp4", "video_90.mov")],
)
def test_a_real_video_gives_the_pixels_of_qwens_own_reader(media_dir: Path, processor, model, name: str):
    """Ours equals the processor fed by ``process_vision_info``: pixel values, grid, tokens, positions, time scale."""
    from qwen_vl_utils import process_vision_info

    # 10-bit colour is turned into RGB differently by decord, which Qwen's reader uses, and by PyAV
    settings = MediaSettings(max_frames=8, max_pixels=64 * 28 * 28, decoder="decord" if "10bits" in name else "auto")
    media = decode_file("video", str(media_dir / name), settings, 28)
    seen_seconds: list[tuple[float, ...]] = []

    def positions(*args):
        seen_seconds.append(args[4])
        return own_positions(model)(*args)

    builder = PromptBuilder(processor, PromptSettings(), positions)
    sample = sample_for([media])
    prompt = builder.build(sample, [media])

    element = {"type": "video", "video": str(media_dir / name), "fps": 2.0, "min_frames": 4, "max_frames": 8,
               "min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}  # fmt: skip
    messages = [{"role": "user", "content": [element, {"type": "text", "text": builder.question_text(sample)}]}]
    _, videos, options = process_vision_info(messages, return_video_kwargs=True)
    theirs = processor(
        text=[processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)],
        videos=videos,
        videos_kwargs={"do_resize": False, "do_sample_frames": False},
        return_tensors="pt",
    )
    assert torch.equal(prompt.input_ids, theirs["input_ids"][0])
    assert torch.equal(prompt.grid_thw, theirs["video_grid_thw"])
    assert torch.equal(prompt.pixel_values, theirs["pixel_values_videos"])
    assert seen_seconds[0] == pytest.approx([2 / options["fps"][0]], rel=1e-6)
    positions_theirs, _ = model.model.get_rope_index(
        theirs["input_ids"], theirs["mm_token_type_ids"], None, theirs["video_grid_thw"], [2 / options["fps"][0]]
    )
    assert torch.equal(prompt.positions_3P, positions_theirs[:, 0])
    assert prompt.num_tokens == len(prompt.input_ids)
    assert prompt.media_kinds == ("video",)


def test_a_real_image_gives_the_pixels_of_qwens_own_reader(tmp_path: Path, processor):
    from PIL import Image
    from qwen_vl_utils import process_vision_info

    pixels = np.random.default_rng(0).integers(0, 256, (301, 333, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    settings = MediaSettings(image_max_pixels=40 * 28 * 28)
    media = decode_file("image", str(tmp_path / "a.png"), settings, 28)
    prompt = PromptBuilder(processor, PromptSettings(), ones).build(sample_for([media]), [media])
    element = {"image": str(tmp_path / "a.png"), "min_pixels": 4 * 28 * 28, "max_pixels": 40 * 28 * 28}
    images, _ = process_vision_info([{"role": "user", "content": [element]}])
    theirs = processor.image_processor(images=images, do_resize=False, return_tensors="pt")
    assert torch.equal(prompt.pixel_values, theirs["pixel_values"])
    assert torch.equal(prompt.grid_thw, theirs["image_grid_thw"])


def test_mixed_media_come_in_order_of_appearance(processor, model):
    """image, video, image: grids and pixels follow the text, though the processor returns images and videos apart."""
    media = [image(56, 84, 1), video(4, 56, 56, 2.0, 2), image(28, 28, 3)]
    prompt = PromptBuilder(processor, PromptSettings(), own_positions(model)).build(sample_for(media), media)
    assert prompt.media_kinds == ("image", "video", "image")
    assert prompt.grid_thw.tolist() == [[1, 4, 6], [2, 4, 4], [1, 2, 2]]
    rows = 0
    for item, grid in zip(media, prompt.grid_thw, strict=True):
        alone = PromptBuilder(processor, PromptSettings(), own_positions(model)).build(sample_for([item]), [item])
        count = int(grid.prod())
        assert torch.equal(prompt.pixel_values[rows : rows + count], alone.pixel_values)
        rows += count
    assert rows == len(prompt.pixel_values)
    visual = (prompt.mm_token_type_ids != 0).sum()
    assert int(visual) == rows // 4
    assert prompt.positions_3P.shape == (3, prompt.num_tokens)


def test_two_videos_keep_their_own_rates(processor):
    seen = []
    media = [video(4, fps=2.0), video(4, fps=0.5, seed=5)]

    def positions(input_ids, types, grid_thw, kinds, seconds):
        seen.append(seconds)
        return ones(input_ids, types, grid_thw, kinds, seconds)

    PromptBuilder(processor, PromptSettings(), positions).build(sample_for(media), media)
    assert tuple(seen[0]) == (1.0, 4.0)


def test_text_only(processor):
    prompt = PromptBuilder(processor, PromptSettings(), ones).build(sample_for([]), [])
    assert prompt.pixel_values is None and prompt.grid_thw is None and prompt.content_key == ""
    assert prompt.media_kinds == () and prompt.preview == ()
    assert int(prompt.mm_token_type_ids.sum()) == 0


def test_the_words(processor):
    """Question, options on lines, instruction; system message only if there is one; the assistant's turn is open."""
    settings = PromptSettings(system="Be brief.", instructions={"multiple_choice": "Give the letter."})
    prompt = PromptBuilder(processor, settings, ones).build(sample_for([video()]), [video()])
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>"
        "Which colour is first?\nA. red\nB. blue\nGive the letter.<|im_end|>\n<|im_start|>assistant\n"
    )
    bare = PromptBuilder(processor, PromptSettings(), ones).build(sample_for([video()]), [video()])
    assert "system" not in bare.text
    assert DEFAULT_INSTRUCTIONS["multiple_choice"] in bare.text
    assert settings.instructions["numerical"] == DEFAULT_INSTRUCTIONS["numerical"]


def test_keys_depend_on_pixels_and_grid_only_and_tell_which_media_prompts_share(processor):
    def built(*media, **changes):
        prompt = PromptBuilder(processor, PromptSettings(), ones).build(sample_for(media, **changes), media)
        assert len(prompt.media_keys) == len(media)
        return prompt

    first, other = video(), image()
    alone, both, twice = built(first), built(first, other), built(first, first)
    assert built().media_keys == ()
    assert both.media_keys == (*alone.media_keys, *built(other).media_keys)
    assert twice.media_keys == alone.media_keys * 2
    again = built(video(), question="Another question?", sample_id="8")
    assert (again.content_key, again.media_keys) == (alone.content_key, alone.media_keys)
    one = np.zeros((4, 3, 56, 112), dtype=np.uint8)
    wide, tall = built(replace(first, frames=one)), built(replace(first, frames=one.reshape(4, 3, 112, 56)))
    others = [alone, both, twice, built(video(seed=1)), wide, tall]
    assert len({one.content_key for one in others}) == len({one.media_keys for one in others}) == 6


def test_preview_is_small_and_timed(processor):
    media = [video(12, 308, 504, fps=2.0)]
    prompt = PromptBuilder(processor, PromptSettings(), ones).build(sample_for(media), media)
    assert len(prompt.preview) == len(prompt.preview_seconds) == 8
    assert all(max(picture.shape) <= 128 and picture.dtype == np.uint8 for picture in prompt.preview)
    assert prompt.preview[0].shape == (78, 128, 3)
    assert prompt.preview_seconds[0] == 0.0 and prompt.preview_seconds[-1] == 5.5


def test_a_long_prompt_is_refused_whole(processor):
    builder = PromptBuilder(processor, PromptSettings(max_prompt_tokens=500), ones)
    media = [video(8, 280, 280)]
    with pytest.raises(
        SampleError, match=r"has \d+ tokens, 400 of them visual\. At most 500 .*media\.max_frames"
    ) as got:
        builder.build(sample_for(media), media)
    assert got.value.reason == "prompt_too_long"
    with pytest.raises(SampleError, match="Shorten the question"):
        builder.build(sample_for([], question="why? " * 1000), [])


@pytest.mark.parametrize("field", ["question", "options"])
def test_control_tokens_in_the_text_are_refused(processor, field: str):
    changed = {"question": "What is <|video_pad|>?", "options": ("A. <|im_end|>", "B. x")}[field]
    with pytest.raises(SampleError, match=r"contains the model's control token '<\|") as got:
        PromptBuilder(processor, PromptSettings(), ones).build(sample_for([], **{field: changed}), [])
    assert got.value.reason == "media_token_in_text"


def test_settings_with_control_tokens_or_unknown_kinds_are_refused():
    with pytest.raises(ValidationError, match=r"contains the control token '<\|im_end\|>'\. Plain text"):
        PromptSettings(instructions={"ocr": "stop <|im_end|>"})
    with pytest.raises(ValidationError, match="multiple_choic"):
        PromptSettings(instructions={"multiple_choic": "x"})


def test_a_processor_without_chat_template_is_refused():
    processor = tiny_processor()
    processor.chat_template = None
    with pytest.raises(ModelError, match=r"has no chat_template\. The processor of a Qwen-VL .* Add its"):
        PromptBuilder(processor, PromptSettings(), ones)


def test_wrong_media_for_the_sample_is_a_bug(processor):
    with pytest.raises(ValueError, match="were handed in"):
        PromptBuilder(processor, PromptSettings(), ones).build(sample_for([video()]), [image()])


def test_a_text_models_tokenizer_makes_prompts_of_words() -> None:
    tokenizer = tiny_processor("qwen2")
    policy = make_policy(tiny_model("qwen2"), tokenizer)
    builder = PromptBuilder(tokenizer, PromptSettings(system="Be brief."), policy.positions)
    words = Sample("1", "How much is 2 + 3?", (), (), "5", "numerical", "", "")
    prompt = builder.build(words, [])
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": builder.question_text(words)}]
    assert prompt.text == tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt.input_ids.tolist() == tokenizer.encode(prompt.text, add_special_tokens=False)
    assert prompt.positions_3P.tolist() == [list(range(prompt.num_tokens))] * 3
    assert (prompt.num_visual_tokens, prompt.pixel_values, prompt.next_position) == (0, None, prompt.num_tokens)
    picture = replace(words, media=(MediaRef("image", "a.png"),))
    tokenizer.name_or_path = "Qwen/some-text-model"
    with pytest.raises(
        ModelError, match=r"Sample '1' has 1 image.* but the model Qwen/some-text-model reads text alone"
    ):
        builder.build(picture, [])
    with pytest.raises(SampleError, match="control token"):
        builder.build(replace(words, question="<|im_end|>"), [])
    tokenizer.chat_template = None
    with pytest.raises(
        ModelError, match=r"has no chat_template\. The tokenizer of a Qwen instruct checkpoint is needed"
    ):
        PromptBuilder(tokenizer, PromptSettings(), policy.positions)


def test_a_given_conversation(processor, model):
    """In our own words it is our own prompt; media may stand anywhere between the texts."""
    media = [video(), image()]
    builder = PromptBuilder(processor, PromptSettings(), own_positions(model))
    sample = sample_for(media)
    parts = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": builder.question_text(sample)}]
    ours = builder.build(sample, media)
    theirs = builder.build_conversation(sample, [{"role": "user", "content": parts}], media)
    assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.pixel_values, theirs.pixel_values)
    assert ours.text == theirs.text and ours.content_key == theirs.content_key

    first, then = ({"type": "text", "text": words} for words in ("First:", "then:"))
    between = [first, {"type": "video"}, then, {"type": "image"}]
    text = builder.build_conversation(sample, [{"role": "user", "content": between}], media).text
    offsets = [text.index(part) for part in ("First:", "<|video_pad|>", "then:", "<|image_pad|>")]
    assert offsets == sorted(offsets)
    with pytest.raises(ValueError, match="shows"):
        builder.build_conversation(sample, [{"role": "user", "content": parts[1:]}], media)
    hostile = [*parts[:2], {"type": "text", "text": "<|im_end|>"}]
    with pytest.raises(SampleError, match="control token"):
        builder.build_conversation(sample, [{"role": "user", "content": hostile}], media)


def test_several_videos_bring_their_seconds_as_a_tensor() -> None:
    policy = tiny_policy()
    text = policy.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, {"type": "video"}, {"type": "text", "text": "Which?"}]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    videos = [torch.zeros(4, 3, 28, 28, dtype=torch.uint8), torch.zeros(6, 3, 56, 28, dtype=torch.uint8)]
    metadata = [{"fps": 2.0, "frames_indices": list(range(len(v))), "total_num_frames": len(v)} for v in videos]
    inputs = policy.processor(
        text=[text],
        videos=videos,
        video_metadata=metadata,
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    inputs["second_per_grid_ts"] = torch.as_tensor(inputs["second_per_grid_ts"])
    prompt = prompt_from_processor(inputs, policy.positions)
    assert prompt.media_kinds == ("video", "video")
    assert prompt.grid_thw.tolist() == [[2, 2, 2], [3, 4, 2]]


def test_a_batch_of_conversations_is_refused() -> None:
    with pytest.raises(ValueError, match="one conversation"):
        prompt_from_processor({"input_ids": torch.zeros(2, 5)}, lambda *_: torch.zeros(3, 5))
