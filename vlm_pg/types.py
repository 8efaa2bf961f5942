"""The records that stages pass to each other.

    record -> Sample -> Prompt -> VisualFeatures -> RolloutGroup -> rewards -> advantages
           -> PackedBatch -> token logprobs -> loss -> optimizer step

Shape letters, here and in every tensor file: B groups, G rollouts a group, P prefix tokens, R response tokens,
T packed tokens, N query heads, K key-value heads, H head dim, D model dim, V vocabulary, F frames, M visual tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from vlm_pg.errors import SampleError, printable

if TYPE_CHECKING:
    import numpy as np
    import torch

MediaKind = Literal["image", "video"]
AnswerKind = Literal[
    "multiple_choice",
    "multiple_select",
    "numerical",
    "ocr",
    "free_form",
    "regression",
    "mean_relative_accuracy",
    "mathematics",
    "box",
    "time_span",
    "exact",
    "yes_no",
]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
# Tokens of Qwen's conversations that no text of a record or of settings may contain, for any tokenizer.
CONTROL_TOKEN = re.compile(
    r"<\|(?:vision_start|vision_end|vision_pad|image_pad|video_pad|im_start|im_end|endoftext)\|>"
)
# Marks in the text of a record: the n-th "<image>" stands for its n-th image.
MEDIA_MARKS: dict[MediaKind, str] = {"image": "<image>", "video": "<video>"}
# The gold answer where options are to be selected and none is right.
NONE_RIGHT = "none"
FinishReason = Literal["stop", "length"]


def right_letters(answer: str) -> set[str]:
    """The letters of a gold answer to options: right_letters("A, C") == {"A", "C"}, right_letters("none") == set()."""
    return set() if answer == NONE_RIGHT else set(answer.split(", "))


@dataclass(frozen=True)
class MediaRef:
    """Where one image or video lies, and which part of it is meant.

    ``path`` is as written in the record: relative to the data root, or a URL (refused unless remote media are allowed).
    Of a video, all in seconds since its first frame: ``start`` and ``end`` are those of the clip that is shown (None:
    of the whole video), ``times`` the moments that are shown in place of those the settings would choose.
    ``subtitles`` is the path of its .srt or .vtt file, "" without one.
    ``folder_fps``: ``path`` is a folder of numbered pictures, of which so many are shown a second; None: it is a file.

        MediaRef(kind="video", path="clips/0001.mp4", start=12.5, end=30.0)
        MediaRef(kind="video", path="frames/0001", folder_fps=3.0)
    """

    kind: MediaKind
    path: str
    start: float | None = None
    end: float | None = None
    times: tuple[float, ...] = ()
    subtitles: str = ""
    folder_fps: float | None = None


@dataclass(frozen=True)
class Sample:
    """One question as stored.

    ``question`` and ``options`` may have marks ("<image>", "<video>") where media stand; media of a kind without marks
    come first. ``options`` are written with their letters ("A. red"). ``answer`` is the gold answer without tags ("B",
    "5.0"); where several options may be right all of their letters ("A, C"), or "none". ``process``: the reasoning that
    leads to it, where the data set has one, for supervised training.
    ``turns``: the conversation after the question: the assistant's first turn, then the user's and the assistant's in
    alternation, up to one of the assistant. Supervised training teaches them instead of ``process`` and ``answer``,
    which may then be "". ``rejected``: the worse response of a preference pair; the better one is the only turn, or
    without turns ``process`` and ``answer``.
    ``dataset``: its set's name, where a run trains on several.
    ``category`` is what evaluation reports by (falls back to ``source``). ``details``: what an evaluation set publishes
    of a question beside that, under the set's own names and as JSON has it ({"duration": "short"}); prompts, readers
    and aggregations of that set look there. ``where``: file and line it was read from ("train.jsonl:3"), for
    messages; not compared.

        Sample("17", "Which colour is shown first?", (MediaRef("video", "17.mp4"),), ("A. red", "B. blue"), "B",
               "multiple_choice", source="flashes", category="seen order")
    """

    sample_id: str
    question: str
    media: tuple[MediaRef, ...]
    options: tuple[str, ...]
    answer: str
    answer_kind: AnswerKind
    source: str
    category: str
    process: str = ""
    turns: tuple[str, ...] = ()
    rejected: str = ""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dataset: str = ""
    where: str = field(default="", compare=False)

    @property
    def response(self) -> str:
        """The assistant's (first) turn that supervised training teaches.

        Without turns: "<think>...</think>\n<answer>B</answer>", the process with its tags or without, or the answer
        alone.
        """
        if self.turns:
            return self.turns[0]
        process = self.process.strip()
        if process and "<think>" not in process:
            process = f"<think>{process}</think>"
        return "\n".join(filter(None, (process, f"<answer>{self.answer}</answer>")))


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be used, as written to ``bad_samples.jsonl``.

    ``trace``: traceback of an error that a decoder was not expected to raise, "" for all others (then not written).

    BadSample("103", "outside_root", "media path '../../etc/passwd' leaves the data root ...", "train.jsonl:3")
    """

    sample_id: str
    reason: str
    message: str
    where: str
    trace: str = ""

    def __str__(self) -> str:
        where, name = printable(self.where, 300), printable(self.sample_id, 200)
        return f"{where}: sample {name} is left out ({self.reason}): {printable(self.message)}"


@dataclass(frozen=True)
class Cue:
    """One text of a video's subtitles, on one line, and when it is shown, in seconds since the video's first frame.

    Cue(12.5, 14.0, "Mind the gap.")
    """

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class DecodedMedia:
    """Pixels of one image or video: already sampled, rotated and resized to what the vision tower will see.

    ``frames``: uint8 [F, 3, height, width]; F is 1 for an image, even for a video.
    ``frame_seconds``: time of each frame in seconds since the video's first one; ``(0.0,)`` for an image.
    ``sampled_fps``: frames per second of the sampled frames (0.0 for an image).
    ``decoder``: which decoder produced it ("decord", "pyav", "torchcodec", "pillow").
    ``subtitles``: those shown during what is shown of a video, in order.
    """

    kind: MediaKind
    frames: np.ndarray
    frame_seconds: tuple[float, ...]
    sampled_fps: float
    decoder: str
    subtitles: tuple[Cue, ...] = ()


@dataclass(frozen=True)
class PromptWords:
    """What a prompt's chat template was given: system message ("" for none) and user's words, as they are.

    ``answer_prefix`` stands behind what the template made of them, "" for nothing. ``media_at``: for each medium in
    order of appearance, before which character of ``user`` it stands; empty: all media come first.
    """

    system: str
    user: str
    answer_prefix: str = ""
    media_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One question as the model reads it: the prefix that all rollouts of a group share.

    ``input_ids`` int64 [P]; media placeholders are already expanded to one token per merged patch.
    ``mm_token_type_ids`` int64 [P]: 0 text, 1 image, 2 video.
    ``positions_3P`` int64 [3, P]: multimodal rotary positions (time, height, width).
    ``pixel_values`` float32 [patches, patch_dim] or None: patches of all media in order of appearance.
    ``grid_thw`` int64 [number of media, 3]: patches along time, height and width (before merging).
    ``media_kinds``: one entry per row of ``grid_thw``.
    ``content_key``: hash of pixels and grids ("" without media); equal keys mean equal visual features.
    ``media_keys``: one hash per row of ``grid_thw``, of that item's pixels and grid: prompts that share only their
    first video have an equal first key. Times are not in it: a video's seconds show in token ids or positions.
    ``response_start``: position of the first response token; needed only where the prompt ends in a visual token.
    ``subtitles``: the lines that stand before the question, "" for none.
    ``words``: the text before the chat template, for servers; None where it is unknown.
    ``preview``: a few uint8 [height, width, 3] thumbnails, and their times, for people.
    ``features``: the vision tower's output for these media, once it has run.
    """

    sample_id: str
    input_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor
    positions_3P: torch.Tensor
    pixel_values: torch.Tensor | None = None
    grid_thw: torch.Tensor | None = None
    media_kinds: tuple[MediaKind, ...] = ()
    content_key: str = ""
    text: str = ""
    subtitles: str = ""
    words: PromptWords | None = None
    preview: tuple[np.ndarray, ...] = ()
    preview_seconds: tuple[float, ...] = ()
    media_keys: tuple[str, ...] = ()
    response_start: int | None = None
    features: VisualFeatures | None = None

    @property
    def num_tokens(self) -> int:
        """P, the number of prefix tokens."""
        return int(self.input_ids.shape[0])

    @property
    def num_visual_tokens(self) -> int:
        """Tokens that take visual features."""
        return int((self.mm_token_type_ids != 0).sum())

    @property
    def next_position(self) -> int:
        """Position of the first response token, on all axes: one past the prompt's last token where that is text.

        Raises:
            ValueError: the prompt ends in a visual token, and ``response_start`` does not say how the rule goes on.
        """
        if self.response_start is not None:
            return self.response_start
        if self.mm_token_type_ids[-1] != 0:
            raise ValueError(
                f"Prompt {self.sample_id!r} ends in a visual token, after which the position rule decides where the "
                "response goes on, and response_start is not set. Build prompts with prompt_from_processor, or end "
                "them in text (<|vision_end|>)."
            )
        return int(self.positions_3P[0, -1]) + 1

    def check_length(self, response_tokens: int, max_positions: int | None) -> None:
        """Raise SampleError ("too_long_for_model") if prompt and response exceed the positions the model knows."""
        last = max(int(self.positions_3P.max()) + 1, self.next_position + response_tokens)
        if max_positions is not None and last > max_positions:
            raise SampleError(
                "too_long_for_model",
                f"Sample {self.sample_id!r} reaches position {last} with a response of {response_tokens} tokens; the "
                f"model knows positions up to {max_positions}. Lower media.max_frames, media.max_pixels or "
                "rollout.max_new_tokens; as a library, use a shorter prompt or response.",
            )


@dataclass(frozen=True)
class VisualFeatures:
    """The vision tower's output for one prompt.

    ``features`` [M, D] in the model's dtype, or None for a text-only prompt; [M, 1 + E, D] where E early decoder layers
    get visual features of their own (DeepStack).
    ``weights_version``: version of the tower's weights it came from; using it under another version raises.
    ``carries_graph``: whether ``features`` is attached to the tower's autograd graph.
    """

    features: torch.Tensor | None
    weights_version: int
    carries_graph: bool


# A layer, and what of it: "input" (behind the last layer its output), "out" and "lse" of attention, "experts".
Kind = tuple[int, str]


@dataclass(eq=False)
class RecordedRows:
    """What the layers computed of n consecutive tokens of a sequence.

    ``tensors``: [n, ...] each (``Network.recorded_kinds``), or what gets them back (``get``). Attention and routes in
    the last layer, and its output, are there for the last rows only where no others are read. ``nbytes``: of all.
    """

    num_tokens: int
    tensors: dict[Kind, Any] = field(default_factory=dict)
    nbytes: int = 0

    def keep(self, kind: Kind, rows: torch.Tensor, put: Callable[[torch.Tensor], Any]) -> None:
        """Add ``put(rows)``."""
        self.tensors[kind] = put(rows)
        self.nbytes += rows.nbytes

    def __reduce__(self) -> Any:
        # Another process gets no tensors: they are larger than what they save there. Sequence ranks exchange
        # rows layer by layer (``RowExchange``).
        return RecordedRows, (self.num_tokens,)


@dataclass(eq=False)
class RecordedForward:
    """The forward of one rollout.

    ``prompt``: consecutive pieces of its prompt, shared with other rollouts. ``own``: pieces of the response's tokens
    but the last one, which is never read. ``logprobs``, ``entropies``: fp32 [R].
    """

    prompt: Sequence[RecordedRows]
    own: Sequence[RecordedRows]
    logprobs: torch.Tensor
    entropies: torch.Tensor

    def release(self) -> None:
        """Drop the tensors: they have been used, or will not be."""
        self.prompt, self.own = (), ()


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    ``token_ids`` int64 [R], the stop token included when there is one. ``rollout_logprobs`` float32 [R]:
    log-probability of each token under the policy that sampled it, at the sampling temperature, before top-p/top-k.
    ``sampling_logprobs`` float32 [R]: under the distribution it was drawn from, after all filters and penalties.
    ``entropies`` float32 [R], nats: of the policy at the sampling temperature, before filters.
    The last two are None where the engine does not know them.
    ``forward``: what sampling computed of it, where the update starts from that (``RecordedForward``).
    ``weights_version``: optimizer steps the weights that sampled it had had; None: those of the policy.
    ``token_versions``: the same for each token, where weights were updated while it was sampled; ``weights_version`` is
    the first of them.
    ``loss_mask`` bool [R]: the tokens that the policy wrote and is trained on; None: all.
    """

    token_ids: torch.Tensor
    rollout_logprobs: torch.Tensor
    finish_reason: FinishReason
    text: str = ""
    sampling_logprobs: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    forward: RecordedForward | None = field(default=None, compare=False, repr=False)
    weights_version: int | None = None
    token_versions: tuple[int, ...] = ()
    loss_mask: torch.Tensor | None = None

    @property
    def num_trained(self) -> int:
        """Number of tokens with a loss."""
        return len(self.token_ids) if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens at each position of a response, under a teacher.

    ``token_ids`` int64 [R, k]; ``logprobs`` float32 [R, k], nats, over the whole vocabulary.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class RewardBreakdown:
    """Rewards of one rollout. ``total`` is None ("no value") when a part that counts could not be computed.

    RewardBreakdown(total=1.1, parts={"accuracy": 1.0, "format": 1.0}, notes={})
    RewardBreakdown(total=None, parts={"accuracy": None, "format": 1.0}, notes={"accuracy": "gold has no number"})
    """

    total: float | None
    parts: Mapping[str, float | None]
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt and its G rollouts; rewards and advantages are present once they are computed.

    ``policy_version``: optimizer steps the policy had seen when it sampled; the fewest of all rollouts.
    ``advantages`` of each rollout; ``token_advantages`` float32 [R] of each rollout, where they differ by token.
    ``kept``: weight of each rollout in the loss, 0 for one that was pruned; empty: 1 for all.
    ``trainer_logprobs``: float32 [R] of each rollout, under the training forward and the weights that sampled; present
    where they were recomputed before several updates.
    ``order``: index of the question among those of its step, in data order.
    ``reference_features``: of a reference model with a tower of its own, once that tower has run.
    ``is_pair``: the rollouts are the chosen and the rejected response of a preference pair.
    ``teacher``: of each rollout, where a teacher is distilled.
    """

    sample: Sample
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    policy_version: int
    rewards: tuple[RewardBreakdown, ...] = ()
    advantages: tuple[float, ...] = ()
    token_advantages: tuple[torch.Tensor, ...] = ()
    kept: tuple[float, ...] = ()
    trainer_logprobs: tuple[torch.Tensor, ...] = ()
    order: int = 0
    reference_features: VisualFeatures | None = None
    is_pair: bool = False
    teacher: tuple[TopTokens, ...] = ()

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The rollouts that must be in one pass: both of a pair, else each for itself."""
        indices = tuple(range(len(self.rollouts)))
        return (indices,) if self.is_pair else tuple((index,) for index in indices)

    @property
    def rollout_weights(self) -> tuple[float, ...]:
        """Weight of each rollout in the loss."""
        return self.kept or (1.0,) * len(self.rollouts)

    @property
    def response_group(self) -> ResponseGroup:
        """The prompt and the token ids of all rollouts; with their recorded forwards, if all have one."""
        found = tuple(rollout.forward for rollout in self.rollouts if rollout.forward and rollout.forward.prompt)
        forwards = found if len(found) == len(self.rollouts) else ()
        return ResponseGroup(self.prompt, tuple(rollout.token_ids for rollout in self.rollouts), forwards)

    def release_forwards(self, pruned_only: bool = False) -> None:
        """Free what was recorded of all rollouts, or of the pruned ones."""
        for rollout, weight in zip(self.rollouts, self.rollout_weights, strict=True):
            if rollout.forward is not None and not (pruned_only and weight):
                rollout.forward.release()

    def only_kept(self) -> RolloutGroup:
        """The group without pruned rollouts."""
        weights = self.rollout_weights
        return self if all(weights) else self.only([index for index, weight in enumerate(weights) if weight])

    def without_features(self) -> RolloutGroup:
        """The group without the prompt's visual features and recorded forwards, which are large."""
        rollouts = tuple(replace(rollout, forward=None) for rollout in self.rollouts)
        return replace(self, prompt=replace(self.prompt, features=None), rollouts=rollouts)

    def only(self, indices: Sequence[int]) -> RolloutGroup:
        """The group with some of its rollouts, and all that belongs to them."""
        of_rollouts = ("rollouts", "rewards", "advantages", "token_advantages", "kept", "trainer_logprobs", "teacher")
        values: dict[str, Any] = {name: getattr(self, name) for name in of_rollouts}
        values = {name: tuple(of[index] for index in indices) for name, of in values.items() if of}
        return replace(self, **values)


@dataclass(frozen=True)
class ResponseGroup:
    """A prompt and the token ids of its responses, as ``Policy.logprobs`` takes them.

    ``responses``: int64 [R_g] each, at least one token long. ``forwards``: of each what sampling computed under the
    present weights, where a pass with gradient is to start from that; empty: it computes everything itself.
    """

    prompt: Prompt
    responses: tuple[torch.Tensor, ...]
    forwards: tuple[RecordedForward, ...] = field(default=(), compare=False, repr=False)
