"""What a server is sent is what the trainer scores: pixels come back exactly, words and positions are checked."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.groups import tiny_policy
from vlm_pg.errors import SampleError, ServerError
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder, Wording, user_content
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server.dialects import Kind
from vlm_pg.rollout.server.messages import ChatMessages, check_prompt_echo, frames_of
from vlm_pg.types import DecodedMedia, MediaKind, MediaRef, Prompt, Sample

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def medium(policy: Policy, kind: MediaKind, frames: int, fps: float = 2.0) -> DecodedMedia:
    side = policy.pixel_factor
    pixels = np.random.default_rng(frames).integers(0, 256, (frames, 3, 2 * side, 3 * side), dtype=np.uint8)
    if kind == "image":
        return DecodedMedia(kind, pixels, (0.0,), 0.0, "test")
    return DecodedMedia(kind, pixels, tuple(i / fps for i in range(frames)), fps, "test")


def build(
    policy: Policy, media: tuple[DecodedMedia, ...], system: str = "", prefix: str = "", wording: Wording | None = None
) -> tuple[Prompt, ChatMessages]:
    refs = tuple(MediaRef(item.kind, "x") for item in media)
    sample = Sample("s", "Which?", refs, ("A. red", "B. blue"), "A", "multiple_choice", "test", "test")
    settings = PromptSettings(system=system)
    builder = PromptBuilder(policy.processor, settings, policy.positions, wording=wording, answer_prefix=prefix)
    return builder.build(sample, media), ChatMessages(policy, {"s": sample}, prefix)


def decoded(part: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(part)))).transpose(2, 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_come_back_as_they_went_in(family: str) -> None:
    policy = tiny_policy(family=family)
    media = (medium(policy, "image", 1), medium(policy, "video", 4), medium(policy, "video", 3))
    prompt, _ = build(policy, media)
    image, even, odd = frames_of(prompt, policy.processor)
    assert np.array_equal(image[:1], media[0].frames)
    assert np.array_equal(even, media[1].frames)
    # Temporal patches are whole: the last frame stands in for the one that lacks.
    assert np.array_equal(odd, media[2].frames[[0, 1, 2, 2]])


def test_pixels_that_are_no_frames_are_refused() -> None:
    policy = tiny_policy()
    prompt, messages = build(policy, (medium(policy, "image", 1),))
    assert prompt.pixel_values is not None
    with pytest.raises(ValueError, match="not 8-bit frames"):
        messages(replace(prompt, pixel_values=prompt.pixel_values * 1.01), "vllm")


def test_messages_hold_system_media_and_words_in_order() -> None:
    policy = tiny_policy()
    image = medium(policy, "image", 1)
    prompt, messages = build(policy, (image,), system="Be brief.")
    system, user = messages(prompt, "openai")
    assert system == {"role": "system", "content": "Be brief."}
    picture, words = user["content"]
    head, _, data = picture["image_url"]["url"].partition(",")
    assert (picture["type"], head) == ("image_url", "data:image/png;base64")
    assert np.array_equal(decoded(data), image.frames[0])
    assert words["text"].startswith("Which?\nA. red\nB. blue\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_media_are_sent_where_their_marks_stand(family: str) -> None:
    """The chat template makes of the parts, in their order, the prompt that is scored."""
    policy = tiny_policy(family=family)
    image = medium(policy, "image", 1)
    media = (image, medium(policy, "video", 2), replace(image, frames=255 - image.frames))
    settings = PromptSettings(instructions=dict.fromkeys(PromptSettings().instructions, ""))
    refs = tuple(MediaRef(item.kind, "x") for item in media)
    sample = Sample("s", "Is <image> in <video>\nor <image>?", refs, (), "yes", "yes_no", "test", "test")
    prompt = PromptBuilder(policy.processor, settings, policy.positions).build(sample, media)
    messages = ChatMessages(policy, {"s": sample})
    messages._checked_words(prompt)
    parts = user_content([{"type": kind} for kind in prompt.media_kinds], prompt.words, True)
    assert "|".join(part.get("text", part["type"]) for part in parts) == "Is |image| in |video|\nor |image|?"
    first, last = (frames_of(prompt, policy.processor)[at] for at in (0, 2))
    assert np.array_equal(first[0], media[0].frames[0]) and np.array_equal(last[0], media[2].frames[0])


@pytest.mark.parametrize(
    ("change", "prefix", "message"),
    [
        ({"text": "green"}, "", r"green.*, its words give .*red.*with the same processor"),
        ({"words": None}, "", r"'s' does not say its words\. Build prompts and messages with the same"),
        ({}, "Best option:(", r"begins its answer with ''.*answers are to begin with 'Best option:\('"),
    ],
)
def test_a_prompt_that_reads_otherwise_than_its_words_is_refused(
    change: dict[str, Any], prefix: str, message: str
) -> None:
    prompt, _ = build(tiny_policy(), ())
    _, messages = build(tiny_policy(), (), prefix=prefix)
    with pytest.raises(ValueError, match=message):
        messages(replace(prompt, **change), "vllm")


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2"])
def test_a_protocols_words_and_the_beginning_of_its_answers_are_sent(family: str) -> None:
    """Not the question as training asks it; the beginning is a message of the assistant's that is gone on with."""
    policy = tiny_policy(family=family)
    media = (medium(policy, "image", 1),) if policy.family.reads_media else ()

    def wording(sample: Sample, media: Sequence[DecodedMedia]) -> tuple[str, str]:
        return "You look closely.", f"{sample.question} ({len(media)} shown)"

    prompt, messages = build(policy, media, "Be brief.", "Best option:(", wording)
    assert prompt.text.endswith("assistant\nBest option:(") and "Be brief." not in prompt.text
    system, user, begun = messages(prompt, "vllm")
    assert system == {"role": "system", "content": "You look closely."}
    words = user["content"][-1]["text"] if policy.family.reads_media else user["content"]
    assert words == f"Which? ({len(media)} shown)"
    assert begun == {"role": "assistant", "content": "Best option:("}
    assert messages.fields == {"add_generation_prompt": False, "continue_final_message": True}
    assert build(policy, media)[1].fields == {}


def test_servers_that_cannot_continue_a_message_are_refused() -> None:
    _, messages = build(tiny_policy(), (), prefix="Best option:(")
    for able in ("vllm", "sglang"):
        messages.check_kind(able)
    with pytest.raises(ServerError, match=r"begin with 'Best option:\('.* of kind openai: vLLM and SGLang alone"):
        messages.check_kind("openai")


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_is_sent_a_lossless_video_file_with_its_frame_rate(family: str) -> None:
    policy = tiny_policy(family=family)
    video = medium(policy, "video", 6)
    prompt, messages = build(policy, (video,))
    (user,) = messages(prompt, "vllm")
    head, _, data = user["content"][0]["video_url"]["url"].partition(",")
    assert head == "data:video/avi;base64"
    with av.open(io.BytesIO(base64.b64decode(data))) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.average_rate) == (6, 2)
        frames = [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in container.decode(stream)]
    assert np.array_equal(np.stack(frames), video.frames)


def test_a_file_has_the_rate_at_which_a_server_counts_the_same_positions() -> None:
    """Of the frames of whole videos, mean rates are fractions: the last frames are left out, or all are spread."""
    policy, rng = tiny_policy(), np.random.default_rng(0)
    for frames in (2, 4, 16, 60):
        for rate in (2.0, 1.0, *rng.uniform(0.02, 2.0, 4)):
            prompt, messages = build(policy, (medium(policy, "video", 4), medium(policy, "video", frames, rate)))
            (user,) = messages(prompt, "vllm")
            first, second = (_stream(part) for part in user["content"][:2])
            assert first == (4, 2) and second[0] == frames and second[1] <= 2
            # As vLLM counts: seconds are stored in float32, and their product with the index is cut off in float64.
            seconds = np.float32(2 / float(second[1])).item()
            expected = [int(index * (seconds * 2)) for index in range(frames // 2)]
            times = prompt.positions_3P[0][prompt.mm_token_type_ids == 2].view(-1, 6)[2:, 0]
            assert (times - times[0]).tolist() == expected, rate


def _stream(part: dict[str, Any]) -> tuple[int, float]:
    """Number of frames and rate of a video file in a message."""
    with av.open(io.BytesIO(base64.b64decode(part["video_url"]["url"].partition(",")[2]))) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        return stream.frames, stream.average_rate


@pytest.mark.parametrize("fps", [2.5, 8.0])
def test_a_video_at_a_higher_rate_is_refused(fps: float) -> None:
    policy = tiny_policy()
    prompt, messages = build(policy, (medium(policy, "video", 16, fps=fps),))
    with pytest.raises(SampleError, match=r"more than 2 frames per second.*media\.fps=2"):
        messages(prompt, "vllm")


def test_the_positions_that_a_server_reads() -> None:
    """Behind 16 frames, 8 s, text goes on past the time for vLLM, past the columns for transformers."""
    policy = tiny_policy(positions="transformers")
    prompt, messages = build(policy, (medium(policy, "video", 16),))
    messages(prompt, "vllm")
    assert torch.equal(messages.served_positions(prompt, "transformers"), prompt.positions_3P)
    served = messages.served_positions(prompt, "qwen")
    assert torch.equal(served, tiny_policy().positions(*_given(prompt)))
    assert served[0, -1] > prompt.positions_3P[0, -1]
    images, messages = build(policy, (medium(policy, "image", 1), medium(policy, "image", 1)))
    assert torch.equal(messages.served_positions(images, "qwen"), images.positions_3P)


def _given(prompt: Prompt) -> tuple[object, ...]:
    return prompt.input_ids, prompt.mm_token_type_ids, prompt.grid_thw, prompt.media_kinds, (1.0,)


@pytest.mark.parametrize("kind", ["openai", "sglang"])
def test_other_servers_are_given_no_video(kind: Kind) -> None:
    policy = tiny_policy()
    _, messages = build(policy, (medium(policy, "video", 4),))
    with pytest.raises(ServerError, match=rf"1 of 1 samples have a video \(the first is 's'\).* of kind {kind}"):
        messages.check_kind(kind)
    messages.check_kind("vllm")
    build(policy, (medium(policy, "image", 1),))[1].check_kind(kind)


def test_another_prompt_at_the_server_is_refused() -> None:
    prompt, _ = build(tiny_policy(), ())
    ids = prompt.input_ids.tolist()
    check_prompt_echo(prompt, {})
    check_prompt_echo(prompt, {"usage": {"prompt_tokens": len(ids)}, "prompt_token_ids": ids})
    with pytest.raises(ServerError, match=rf"{len(ids) + 3} tokens, the trainer scores {len(ids)}\. "):
        check_prompt_echo(prompt, {"usage": {"prompt_tokens": len(ids) + 3}})
    other = [*ids]
    other[4] += 1
    with pytest.raises(ServerError, match=f"token 4 of the prompt is {other[4]} at the server and {ids[4]} here"):
        check_prompt_echo(prompt, {"usage": {"prompt_tokens": len(ids)}, "prompt_token_ids": other})
    assert torch.equal(prompt.input_ids, torch.tensor(ids))


def test_a_video_that_the_server_has_sampled_again_names_the_servers_flag() -> None:
    policy = tiny_policy()
    flag = (
        r"""started with --media-io-kwargs '\{"video": \{"num_frames": -1\}\}'\. Do so, or lower media.max_frames\."""
    )
    prompt, _ = build(policy, (medium(policy, "video", 34),))
    with pytest.raises(ServerError, match=f"must not sample frames again. vLLM keeps at most 768 frames .*{flag}"):
        check_prompt_echo(prompt, {"usage": {"prompt_tokens": prompt.num_tokens - 6}})
    picture, _ = build(policy, (medium(policy, "image", 1),))
    with pytest.raises(ServerError, match=r"frames again\.$"):
        check_prompt_echo(picture, {"usage": {"prompt_tokens": 3}})


def test_a_text_models_messages_are_strings() -> None:
    """As its chat template takes them; nothing about media is sent."""
    policy = tiny_policy(family="qwen2")
    prompt, messages = build(policy, (), "Be brief.")
    words = "Which?\nA. red\nB. blue\n"
    for kind in ("vllm", "sglang", "openai"):
        system, user = messages(prompt, kind)  # type: ignore[arg-type]
        assert system == {"role": "system", "content": "Be brief."}
        assert user["role"] == "user" and user["content"].startswith(words)


@pytest.mark.parametrize("name", ["image_mean", "image_std"])
@pytest.mark.parametrize("family", FAMILIES)
def test_videos_that_vllm_would_normalize_otherwise_are_refused(family: str, name: str) -> None:
    """vLLM uses the image processor's numbers for both; images alone do not depend on the video processor."""
    policy = tiny_policy(family=family)
    image, video = policy.processor.image_processor, policy.processor.video_processor
    image.image_mean, image.image_std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    video.image_mean, video.image_std = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]
    videos = build(policy, (medium(policy, "video", 4),))[1]
    images = build(policy, (medium(policy, "image", 1),))[1]
    videos.check_kind("vllm")
    setattr(video, name, [0.5, 0.25, 0.5])
    with pytest.raises(
        ServerError,
        match=rf"^1 of 1 samples have a video \(the first is 's'\).* video processor normalizes with .*{name} "
        r"\[0\.5, 0\.25, 0\.5\].*, its image processor with image_mean \[0\.5, 0\.5, 0\.5\] and image_std "
        r"\[0\.5, 0\.5, 0\.5\]\. vLLM .*\. Set the same image_mean and image_std .*rollout\.engine=in_process\.$",
    ):
        videos.check_kind("vllm")
    images.check_kind("vllm")
