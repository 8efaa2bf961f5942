"""``vlm-pg bench step`` with the published package ``prefix_grouper`` (arXiv 2506.05433) among the contestants.

    python -m scripts.bench.others --points 4096,8,512 --model 7b --dtype bf16 --checkpointing

It gathers queries, keys and values into a prefix tensor and a tensor of suffixes in every layer, copies the prefix's
keys and values per response, and calls a given attention function twice. That function must align causality at the
bottom right, as FlashAttention-2 does; transformers' sdpa and eager functions do not. Where flash-attn is missing,
``bottom_right_attention`` stands in for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from scripts.bench import run
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench import step
from vlm_pg.bench.case import can_use_flash_attention_2, set_attention
from vlm_pg.bench.runner import Contestant
from vlm_pg.bench.step_case import TrainingCase
from vlm_pg.bench.work import shared_work

LAYER_ATTENTION, STAND_IN = "prefix_grouper_attention", "vlm_pg_bench_bottom_right"

CONTESTANTS = step.CONTESTANTS | {
    "prefix-grouper-kind": Contestant(
        "prefix_grouper at its best: the responses' last tokens left out, hidden states split "
        "first, logits of response tokens only, in the chunks ours uses; without flash-attn (always on a CPU) the "
        "attention function of both is ours, on torch's sdpa: the package has none there",
        shared_work,
        "scripts.bench.others:prefix_grouper_kind",
        "prefix_grouper",
    )
}


class StepRun(step.StepRun):
    command = ("python", "-m", "scripts.bench.others")
    contestants_known = CONTESTANTS


main = StepRun.main


class BottomRightMask:
    """The additive mask of a suffix call, made once per step: [Q, L], shared by layers, heads and responses."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        shape = query.shape[2], key.shape[2]
        if shape not in self._masks:
            never = torch.full(shape, float("-inf"), dtype=query.dtype, device=query.device)
            self._masks[shape] = never.triu_(shape[1] - shape[0] + 1)
        return self._masks[shape]


def bottom_right_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    bench_mask: BottomRightMask | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention aligned at the bottom right: q [B, N, Q, H], k, v [B, K, L, H], Q <= L -> [B, Q, N, H].

    The padding mask is not needed: with one group the prefix is not padded, and what pads a response comes after each
    of its real queries. On a CPU heads are not repeated in memory.

    ``bench_mask``: where torch's flash operator, which needs none, takes these tensors, None.
    """
    grouped = query.shape[1] != key.shape[1]
    if query.shape[2] == key.shape[2]:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    elif bench_mask is None:
        # The flash kernels behind this operator take fewer key-value heads and align at the bottom right.
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scaling)[0]
    else:
        mask = bench_mask(query, key)
        if grouped and query.is_cuda:  # with a mask, only the slow kernel takes fewer key-value heads on a GPU
            copies = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), False
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def _attention_options(case: TrainingCase) -> dict[str, Any]:
    """Sets the model to the package's attention and says which function it is to call twice a layer."""
    from transformers import AttentionInterface

    import_module("prefix_grouper.utils.register_transformers").register_attention()
    AttentionInterface.register(STAND_IN, bottom_right_attention)
    set_attention(case, LAYER_ATTENTION)
    if can_use_flash_attention_2(case):
        return {"prefix_grouper_attn_func": "flash_attention_2"}
    mask = None if _has_flash_operator(case) else BottomRightMask()
    return {"prefix_grouper_attn_func": STAND_IN, "bench_mask": mask}


def _has_flash_operator(case: TrainingCase) -> bool:
    """Whether this is a GPU in bf16, or a count of what one is asked to do: those tensors say that they are a CPU's."""
    on_gpu = case.device.type == "cuda" or isinstance(case.policy.kernel, CudaFlashKernel)
    return on_gpu and case.policy.dtype != torch.float32


def prefix_grouper_kind(case: TrainingCase) -> float:
    """At its best: last tokens left out, hidden states split first, logits of real response tokens only."""
    ids, mask = case.padded_responses()
    grouper, inputs = _grouped_inputs(case, ids[:, :-1], mask[:, 1:])
    hidden = case.policy.family.language_model(case.model)(**inputs).last_hidden_state
    _, _, suffix, suffix_mask = grouper.split_output(hidden, include_prefix_last=1)
    # The same chunked output head that ours uses.
    stream_rows = inputs["input_ids"].shape[1]
    logprobs, _ = case.policy.token_logprobs(suffix[suffix_mask], ids[mask], 1.0, stream_rows=stream_rows)
    loss = case.loss(logprobs.split(case.lengths))
    loss.backward()
    return loss.item()


def _grouped_inputs(case: TrainingCase, ids: torch.Tensor, mask: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The package's object, and what the model takes: ids int64 [1, T], positions int64 [3, 1, T] that go on behind the
    prefix, and the package's attention."""
    options = _attention_options(case)
    prefix = case.prefix[None]
    prefix_mask = torch.ones_like(prefix, dtype=torch.bool)
    grouper = import_module("prefix_grouper").PrefixGrouper.from_ungrouped_masks(
        prefix_mask=prefix_mask, suffix_mask=mask, group_sizes=len(ids), padding_mode="right", device=case.device
    )
    count = prefix.shape[1]
    parts = [torch.arange(count), *(count + torch.arange(length) for length in mask.sum(1).tolist())]
    return grouper, {
        "input_ids": grouper.concat_input(prefix, prefix_mask, ids, mask),
        "position_ids": torch.cat(parts).to(case.device).expand(3, 1, -1),
        "attention_mask": {"full_attention": None},
        "use_cache": False,
        "prefix_grouper": grouper,
        **options,
    }


if __name__ == "__main__":
    run(main)
