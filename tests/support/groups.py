"""Random prompts and groups of every kind, and transformers' own repeated forward over them: the oracle side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.models.loading import make_policy
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import PARTS, ModelSettings, Part
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.types import Prompt, ResponseGroup

KINDS = ("text", "image", "images", "video", "image+video")
# Of each response its index in the group and the log-probabilities of its tokens, group by group.
Chunk = list[list[tuple[int, torch.Tensor]]]
# A loss and the gradients of all weights.
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]
_WORDS = [
    *("Which", "colour", "is", "shown", "first", "?", "How", "many", "times", "does", "the", "light", "blink"),
    *("what", "happens", "in", "the", "video", "last"),
]


@dataclass(frozen=True)
class Case:
    """One prompt twice: as ours, and as the Hugging Face processor returned it."""

    prompt: Prompt
    inputs: dict[str, Any]


def tiny_policy(
    train_vision: bool = False,
    dtype: torch.dtype = torch.float32,
    family: str = "qwen2_5_vl",
    train: Sequence[Part] = (),
    **settings: Any,
) -> Policy:
    """``train``: its parts that do; none named: the language model, and with ``train_vision`` all."""
    model = tiny_model(family).to(dtype)
    parts = train or (PARTS if train_vision else ("language",))
    return make_policy(model, tiny_processor(family), ModelSettings(path="tiny", train=tuple(parts), **settings))


def plain_model(policy: Policy) -> Any:
    """The same weights under transformers' own attention."""
    model = tiny_model(policy.family.model_type).to(policy.dtype)
    model.load_state_dict(policy.model.state_dict())
    model.set_attn_implementation("sdpa")
    for name, weight in model.named_parameters():
        weight.requires_grad_(policy.family.part_of(name) in policy.settings.train)
    return model


def make_case(
    policy: Policy,
    kind: str,
    seed: int,
    seconds_per_frame: float = 0.5,
    media_seed: int | None = None,
    max_side: int = 4,
    max_words: int = 29,
) -> Case:
    """A prompt of ``kind`` with random pixels, sizes and words; equal ``media_seed`` give equal media.

    Sides are 1 to ``max_side`` visual tokens long, videos have 2 to 8 frames. For a text model a passage of words
    stands in for each medium.
    """
    words = np.random.default_rng(seed)
    rng = words if media_seed is None else np.random.default_rng(media_seed)
    if not policy.family.reads_media:
        passages = {"text": 0, "images": 3, "image+video": 2}.get(kind, 1)
        read = " ".join(rng.choice(_WORDS, passages * 10 * max_side))
        return _text_case(policy, f"{read} {_question(words, max_words)}", f"{kind}-{seed}")

    def picture(frames: int) -> np.ndarray:
        height, width = (policy.pixel_factor * int(rng.integers(1, max_side + 1)) for _ in range(2))
        return rng.integers(0, 256, (frames, 3, height, width), dtype=np.uint8)

    images = [picture(1)[0] for _ in range({"image": 1, "images": 3, "image+video": 1}.get(kind, 0))]
    videos = [picture(2 * int(rng.integers(1, 5))) for _ in range({"video": 1, "image+video": 1}.get(kind, 0))]
    content: list[dict[str, str]] = [{"type": "image"} for _ in images] + [{"type": "video"} for _ in videos]
    rng.shuffle(content)
    content.append({"type": "text", "text": _question(words, max_words)})
    text = policy.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    metadata = [
        {"fps": 1 / seconds_per_frame, "frames_indices": list(range(len(v))), "total_num_frames": len(v)}
        for v in videos
    ]
    inputs = policy.processor(
        text=[text],
        images=images or None,
        videos=videos or None,
        video_metadata=metadata or None,
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    return Case(prompt_from_processor(inputs, policy.positions, f"{kind}-{seed}"), dict(inputs))


def _question(words: np.random.Generator, max_words: int) -> str:
    count = int(words.integers(max_words // 2, max_words + 1))
    return " ".join(words.choice(_WORDS, count))


def _text_case(policy: Policy, question: str, name: str) -> Case:
    text = policy.processor.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    outputs = dict(policy.processor(text=[text], return_tensors="pt"))
    inputs = {part: outputs[part] for part in ("input_ids", "attention_mask")}
    return Case(_text_prompt(policy, inputs, name), inputs)


def _text_prompt(policy: Policy, inputs: dict[str, Any], name: str) -> Prompt:
    types = torch.zeros_like(inputs["input_ids"])
    return prompt_from_processor(inputs | {"mm_token_type_ids": types}, policy.positions, name)


def continued_case(policy: Policy, case: Case, more: torch.Tensor) -> Case:
    """The same conversation some tokens later: ``more`` int64 [n] after the prompt, positions computed anew."""
    ids = torch.cat([case.inputs["input_ids"], more[None]], dim=1)
    if not policy.family.reads_media:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return Case(_text_prompt(policy, inputs, f"{case.prompt.sample_id}+{len(more)}"), inputs)
    types = torch.nn.functional.pad(case.inputs["mm_token_type_ids"], (0, len(more)))
    inputs = case.inputs | {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
    return Case(prompt_from_processor(inputs, policy.positions, f"{case.prompt.sample_id}+{len(more)}"), inputs)


def random_group(policy: Policy, case: Case, lengths: Sequence[int], seed: int) -> ResponseGroup:
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([t for t in range(policy.vocab_size) if t not in policy.media_token_ids])
    responses = tuple(allowed[torch.randint(len(allowed), (n,), generator=generator)] for n in lengths)
    return ResponseGroup(case.prompt, responses)


def repeated_logprobs(model: Any, case: Case, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each response's token log-probabilities from transformers' forward over prompt + response, one at a time."""
    return [batched_logprobs(model, case, [response])[0] for response in responses]


def batched_logprobs(model: Any, case: Case, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same with the prompt and its media repeated for every response, padded on the right, in one forward."""
    count, prompt_length = len(responses), case.inputs["input_ids"].shape[1]
    media = {
        name: _repeat(case.inputs[name], count)
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
        if case.inputs.get(name) is not None
    }
    read = torch.nn.utils.rnn.pad_sequence(list(responses), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in responses], batch_first=True)
    ids = torch.cat([case.inputs["input_ids"].expand(count, -1), read], dim=1)
    mask = torch.cat([case.inputs["attention_mask"].expand(count, -1), mask], dim=1)
    if "mm_token_type_ids" in case.inputs:
        media["mm_token_type_ids"] = torch.nn.functional.pad(
            case.inputs["mm_token_type_ids"].expand(count, -1), (0, read.shape[1])
        )
        # Of a text model transformers knows the positions itself.
        media["position_ids"] = positions_4P(case.prompt, read.shape[1]).expand(-1, count, -1).to(ids.device)
    logits = model(input_ids=ids, attention_mask=mask, **media).logits
    predicted = logits[:, prompt_length - 1 : -1].float().log_softmax(-1).gather(-1, read[:, :, None])[:, :, 0]
    return [row[: len(response)] for row, response in zip(predicted, responses, strict=True)]


def positions_4P(prompt: Prompt, more: int = 0) -> torch.Tensor:
    """int64 [4, 1, P + more] as transformers' forward and ``generate`` take them: indices, then time, height, width.

    By the rule of the policy that built the prompt; transformers would count by its own.
    """
    following = (prompt.next_position + torch.arange(more)).expand(3, -1)
    indices = torch.arange(prompt.num_tokens + more)[None]
    return torch.cat([indices, torch.cat([prompt.positions_3P, following], dim=1)])[:, None]


def _repeat(values: Any, count: int) -> Any:
    return values * count if isinstance(values, list) else values.repeat(count, *[1] * (values.dim() - 1))


def weighted_sum(logprobs: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """A loss with another weight for every token, signs mixed, so that errors cannot cancel."""
    flat = torch.cat([response for group in logprobs for response in group])
    weights = (torch.linspace(-1.0, 1.5, len(flat)).cos() + 0.3).to(flat.device)
    return (flat * weights).sum()


def gradient_errors(ours: torch.nn.Module, theirs: torch.nn.Module) -> dict[str, float]:
    """Relative error of every trained parameter's gradient; no gradient counts as a gradient of zeros."""
    reference = dict(theirs.named_parameters())
    errors = {}
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        got, expected = (
            torch.zeros_like(parameter) if g is None else g for g in (parameter.grad, reference[name].grad)
        )
        errors[name] = float((got - expected).norm() / expected.norm().clamp_min(1e-12))
    return errors


def random_groups(policy: Policy, shapes: Iterable[tuple[str, Sequence[int]]]) -> list[ResponseGroup]:
    """A group for each (kind of prompt, lengths of responses); seeds are their indices."""
    return [random_group(policy, make_case(policy, kind, i), lengths, i) for i, (kind, lengths) in enumerate(shapes)]


def token_weights(group: int, index: int, length: int) -> torch.Tensor:
    """A weight for every token of a response."""
    return (torch.arange(length) + 3.0 * index + group).cos() + 0.2


def chunk_loss(chunk: Chunk) -> torch.Tensor:
    """As ``weighted_sum``, of some responses of some groups."""
    return torch.stack([token_weights(g, i, len(v)) @ v for g, group in enumerate(chunk) for i, v in group]).sum()


def outcome(policy: Policy, groups: list[ResponseGroup], chunk_tokens: int | None) -> Outcome:
    """Of one pass, or of prompts once and chunks of responses."""
    policy.zero_grad()
    policy.vision.weights_changed()  # a fresh pass of a trained tower
    loss = backward_in_chunks(policy, groups, chunk_loss, chunk_tokens)
    return loss, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def check_equal(ours: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert torch.allclose(ours[0], expected[0], rtol=1e-5)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (ours[1][name] - gradient).norm() <= tolerance * gradient.norm().clamp_min(1e-6), name
