"""A prompt as chat messages with inline media: exactly what the trainer scores.

Media come from the prompt's own pixels: patches are put back in place and the normalization is undone, which gives the
frames that the processor received. Nothing is decoded or resized a second time.

Shape letters: F frames.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch

from vlm_pg.errors import SampleError, ServerError
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.models.positions import TOKEN_TYPES
from vlm_pg.models.settings import PositionRule
from vlm_pg.prompts.builder import user_content
from vlm_pg.prompts.chat import render_chat
from vlm_pg.rollout.server.dialects import VLLM_FRAMES_PER_SECOND, Kind
from vlm_pg.types import Prompt, PromptWords, Sample

# Largest distance of a pixel from a whole number after float32 normalization was undone.
LARGEST_ROUNDING = 0.05
# Kinds that continue an assistant's message (continue_final_message).
CONTINUING: tuple[Kind, ...] = ("vllm", "sglang")
# For prompts with a video that the server read at another length.
ALL_FRAMES = (
    "vLLM keeps at most 768 frames of a video, and versions without a video loader of the model's own 32, unless they "
    """are started with --media-io-kwargs '{"video": {"num_frames": -1}}'. Do so, or lower media.max_frames."""
)
# Of a file's frame rate.
RATE_DENOMINATOR = 10_000
_SECONDS = re.compile(r"<([0-9.]+) seconds>")


class ChatMessages:
    """Chat messages of prompts.

    Args:
        policy: its processor and chat template made the prompts.
        samples: all that may be sent, by sample id.
        answer_prefix: the beginning of every answer.
    """

    def __init__(self, policy: Policy | WeightlessPolicy, samples: Mapping[str, Sample], answer_prefix: str = ""):
        self._policy, self._samples, self._answer_prefix = policy, samples, answer_prefix

    def check_kind(self, kind: Kind) -> None:
        """Raise ServerError for videos and answer prefixes that this kind of server does not support.

        vLLM normalizes frames and images alike on the device, by the image processor's values (its
        ``mm_device_do_normalize``, default for Qwen-VL).
        """
        if self._answer_prefix and kind not in CONTINUING:
            raise ServerError(
                f"Answers are to begin with {self._answer_prefix!r}, and this server is of kind {kind}: vLLM and "
                "SGLang alone are known to go on from a message that is begun (continue_final_message). Use one of "
                "these, a protocol without answer_prefix, or rollout.engine=in_process."
            )
        videos = [name for name, sample in self._samples.items() if any(ref.kind == "video" for ref in sample.media)]
        if videos and kind != "vllm":
            raise ServerError(
                f"{len(videos)} of {len(self._samples)} samples have a video (the first is {videos[0]!r}), and frames "
                f"that are sampled already can be given to vLLM alone; this server is of kind {kind}. Use images, "
                "vLLM, or rollout.engine=in_process."
            )
        if videos and self._policy.family.reads_media:
            processor = self._policy.processor
            image, video = (
                {"image_mean": [*one.image_mean], "image_std": [*one.image_std]}
                for one in (processor.image_processor, processor.video_processor)
            )
            if image != video:
                raise ServerError(
                    f"{len(videos)} of {len(self._samples)} samples have a video (the first is {videos[0]!r}), and the "
                    f"model's video processor normalizes with {_listed(video)}, its image processor with "
                    f"{_listed(image)}. vLLM normalizes video frames with the image processor's values, so it would "
                    "sample from other pixels than the trainer scores. Set the same image_mean and image_std for both "
                    "in the model's processor files, for the server too, or use rollout.engine=in_process."
                )

    def __call__(self, prompt: Prompt, kind: Kind) -> list[dict[str, Any]]:
        """OpenAI chat messages with media as data URLs.

        Raises:
            SampleError: a video at another frame rate than the server's, or with other times in words.
            ValueError: the prompt does not say its words, or they are not what it reads.
        """
        words = self._checked_words(prompt)
        self.check_video(prompt)
        rates = iter(self._file_rates(prompt))
        content = [
            {
                "type": f"{medium}_url",
                f"{medium}_url": {
                    "url": _video_url(frames, next(rates)) if medium == "video" else _image_url(frames[0])
                },
            }
            for medium, frames in zip(prompt.media_kinds, frames_of(prompt, self._policy.processor), strict=True)
        ]
        return self._conversation(content, words)

    def _conversation(self, media: list[dict[str, Any]], words: PromptWords) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": words.system}] if words.system else []
        content = user_content(media, words, self._policy.family.reads_media)
        begun = [{"role": "assistant", "content": words.answer_prefix}] if words.answer_prefix else []
        return [*system, {"role": "user", "content": content}, *begun]

    def _checked_words(self, prompt: Prompt) -> PromptWords:
        """The prompt's words, from which the chat template must render the text that is scored here."""
        words = prompt.words
        if words is None or words.answer_prefix != self._answer_prefix:
            came = "does not say its words" if words is None else f"begins its answer with {words.answer_prefix!r}"
            raise ValueError(
                f"The prompt of sample {prompt.sample_id!r} {came}. Build prompts and messages with the same "
                f"PromptBuilder; answers are to begin with {self._answer_prefix!r}."
            )
        media: list[dict[str, Any]] = [{"type": kind} for kind in prompt.media_kinds]
        conversation = self._conversation(media, words)
        rendered = render_chat(self._policy.processor, conversation, **_ending_arguments(words.answer_prefix))
        if rendered != prompt.text:
            raise ValueError(
                f"The prompt of sample {prompt.sample_id!r} reads {prompt.text!r}, its words give {rendered!r}. "
                "Build prompts and messages with the same processor; a chat template that writes something else before "
                "an answer that is begun allows no answer_prefix."
            )
        return words

    @property
    def fields(self) -> dict[str, Any]:
        """Further fields of a request with these messages: whether to continue the last one."""
        return _ending_arguments(self._answer_prefix) if self._answer_prefix else {}

    def served_positions(self, prompt: Prompt, rule: PositionRule) -> torch.Tensor:
        """int64 [3, P]: the prompt's positions at the rates of its files, by the rule that the server counts by."""
        frames = self._policy.pixels.temporal_patch_size
        seconds = tuple(float(frames / rate) for rate in self._file_rates(prompt))
        media = (prompt.grid_thw, prompt.media_kinds, seconds)
        return self._policy.positions(prompt.input_ids, prompt.mm_token_type_ids, *media, rule=rule)

    def _file_rates(self, prompt: Prompt) -> list[Fraction]:
        """Frames per second of each video's file, with which vLLM counts the prompt's positions where it can."""
        kinds, policy = prompt.media_kinds, self._policy
        if "video" not in kinds or policy.family.video_time != "seconds":
            return [Fraction(VLLM_FRAMES_PER_SECOND)] * kinds.count("video")
        assert prompt.grid_thw is not None
        per_second = policy.model.config.vision_config.tokens_per_second
        area = policy.pixels.merge_size**2
        grids = [grid for grid, kind in zip(prompt.grid_thw.tolist(), kinds, strict=True) if kind == "video"]
        times_M = prompt.positions_3P[0][prompt.mm_token_type_ids == TOKEN_TYPES["video"]]
        of_videos = times_M.split([times * rows * columns // area for times, rows, columns in grids])
        return [
            file_rate(
                (times - times[0]).view(grid[0], -1)[:, 0].tolist(), per_second, policy.pixels.temporal_patch_size
            )
            for times, grid in zip(of_videos, grids, strict=True)
        ]

    def check_video(self, prompt: Prompt) -> None:
        """Raise SampleError for a video that a server would read with other timestamps than this process."""
        if "video" not in prompt.media_kinds:
            return
        if not torch.equal(self.served_positions(prompt, self._policy.settings.positions), prompt.positions_3P):
            raise SampleError(
                "video_for_server",
                f"the video of sample {prompt.sample_id!r} is shown at more than {VLLM_FRAMES_PER_SECOND} frames per "
                "second, or at times without a constant rate. vLLM would drop frames of such a file, or count other "
                f"rotary positions. Set media.fps={VLLM_FRAMES_PER_SECOND}, or use rollout.engine=in_process.",
            )

        # Some families write seconds before every temporal patch; vLLM's count from 0 at its frame rate.
        assert prompt.grid_thw is not None
        depth = self._policy.pixels.temporal_patch_size
        served = [
            f"{(depth * time + (depth - 1) / 2) / VLLM_FRAMES_PER_SECOND:.1f}"
            for grid, kind in zip(prompt.grid_thw.tolist(), prompt.media_kinds, strict=True)
            if kind == "video"
            for time in range(grid[0])
        ]
        until_media_end = prompt.input_ids[: int(prompt.mm_token_type_ids.nonzero()[-1]) + 1]
        written = _SECONDS.findall(self._policy.processor.tokenizer.decode(until_media_end))[-len(served) :]
        if written and written != served:
            raise SampleError(
                "video_for_server",
                f"the prompt of sample {prompt.sample_id!r} has the times of its frames in words ({written[0]} s is "
                f"the first), and vLLM would write others for the file it is sent (0 on, {VLLM_FRAMES_PER_SECOND} a "
                "second). Use rollout.engine=in_process.",
            )


def _listed(values: Mapping[str, object]) -> str:
    return " and ".join(f"{name} {value}" for name, value in values.items())


def _ending_arguments(answer_prefix: str) -> dict[str, bool]:
    """Arguments of the chat template, here and at the server: start an answer, or continue one."""
    if answer_prefix:
        return {"add_generation_prompt": False, "continue_final_message": True}
    return {"add_generation_prompt": True}


def frames_of(prompt: Prompt, processor: Any) -> list[np.ndarray]:
    """The frames the processor was handed, uint8 [F, 3, height, width] per medium, in order.

    F is a whole number of temporal patches: a video with an odd number of frames ends in its last one twice, an image
    comes as often as a temporal patch has frames.

    Raises:
        ValueError: the pixels do not come from 8-bit frames under this processor's normalization.
    """
    if prompt.pixel_values is None or prompt.grid_thw is None:
        return []
    parts = prompt.pixel_values.split(prompt.grid_thw.prod(-1).tolist())
    return [
        _frames(pixels, grid.tolist(), processor.image_processor if kind == "image" else processor.video_processor)
        for pixels, grid, kind in zip(parts, prompt.grid_thw, prompt.media_kinds, strict=True)
    ]


def _frames(pixels: torch.Tensor, grid_thw: list[int], processor: Any) -> np.ndarray:
    times, rows, columns = grid_thw
    merge, patch, depth = processor.merge_size, processor.patch_size, processor.temporal_patch_size
    # As transformers lays patches out: time, blocks of merge x merge patches, then colour, time and position in one.
    layout = (times, rows // merge, columns // merge, merge, merge, 3, depth, patch, patch)
    mean, std = (torch.tensor(values).float().view(3, 1, 1) for values in (processor.image_mean, processor.image_std))
    frames = np.empty((times, depth, 3, rows * patch, columns * patch), np.uint8)
    # One temporal patch at a time: a long video is several GB as floats.
    for time, patches in enumerate(pixels.view(layout)):
        normalized = patches.permute(5, 4, 0, 2, 6, 1, 3, 7).reshape(frames.shape[1:]).float()
        values = (normalized * std + mean) / processor.rescale_factor
        whole = values.round()
        if (values - whole).abs().max() > LARGEST_ROUNDING or whole.min() < 0 or whole.max() > 255:
            raise ValueError(
                "The prompt's pixels are not 8-bit frames under the processor's image_mean, image_std and "
                "rescale_factor, so they cannot be sent to a server. Build the prompt with the policy's own processor."
            )
        frames[time] = whole.to(torch.uint8).numpy()
    return frames.reshape(times * depth, *frames.shape[2:])


def _image_url(frame: np.ndarray) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    # Colours survive any level; a low one is several times faster.
    Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0))).save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def file_rate(times: Sequence[int], positions_per_second: float, frames_per_grid: int) -> Fraction:
    """Frames per second of a file, at most vLLM's, at which temporal grid i of a video has position ``times[i]``.

    That position is floor(i * seconds * positions_per_second) for grids of ``seconds``, which bounds the seconds from
    both sides; the middle is where no rounding decides. A rate that does not fit is returned for times without one.
    """
    seconds = frames_per_grid / VLLM_FRAMES_PER_SECOND
    positions = [index * positions_per_second for index in range(len(times))]
    if list(times) == [int(position * seconds) for position in positions]:
        return Fraction(VLLM_FRAMES_PER_SECOND)
    least = max(time / position for time, position in zip(times[1:], positions[1:], strict=True))
    largest = min((time + 1) / position for time, position in zip(times[1:], positions[1:], strict=True))
    seconds = max(seconds, (max(seconds, least) + largest) / 2)
    return Fraction(frames_per_grid / seconds).limit_denominator(RATE_DENOMINATOR)


def _video_url(frames: np.ndarray, rate: Fraction) -> str:
    """A lossless file, which has its frame rate; vLLM takes a list of JPEG frames for 1 frame per second."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.height, stream.width = frames.shape[2:]
        stream.pix_fmt = "bgr0"
        for frame in frames:
            pixels = np.ascontiguousarray(frame.transpose(1, 2, 0))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return "data:video/avi;base64," + base64.b64encode(buffer.getvalue()).decode()


def check_prompt_echo(prompt: Prompt, answer: Mapping[str, Any]) -> Literal["ids", "length", ""]:
    """What the server reports of the prompt it read: its ids, else its length, else nothing.

    Raises:
        ServerError: it read another prompt.
    """
    ours = prompt.num_tokens
    ids = answer.get("prompt_token_ids")
    theirs = len(ids) if ids else (answer.get("usage") or {}).get("prompt_tokens")
    if theirs is not None and theirs != ours:
        sampled = f" {ALL_FRAMES}" if "video" in prompt.media_kinds else ""
        raise ServerError(
            f"Sample {prompt.sample_id!r}: the server read a prompt of {theirs} tokens, the trainer scores {ours}. "
            "Serve the same model with the same chat template and processor files, and image limits (min_pixels, "
            "max_pixels) that contain media.min_pixels and media.max_pixels; a server must not sample "
            f"frames again.{sampled}"
        )
    if ids and ids != prompt.input_ids.tolist():
        index = next(i for i, (a, b) in enumerate(zip(ids, prompt.input_ids.tolist(), strict=True)) if a != b)
        raise ServerError(
            f"Sample {prompt.sample_id!r}: token {index} of the prompt is {ids[index]} at the server and "
            f"{int(prompt.input_ids[index])} here. Serve the same model with the same chat template and processor."
        )
    return "ids" if ids else "" if theirs is None else "length"
