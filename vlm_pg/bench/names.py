"""Names of the contestants and the work each must do; known without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlm_pg.bench.work import (
    CHUNK_TOKENS,
    Work,
    chunked_work,
    repeated_work,
    sequential_work,
    shared_work,
    whole_logits_work,
)

# In the order in which they are measured when time is short.
WORK: dict[str, Callable[[int, Sequence[int]], Work]] = {
    "grouped": shared_work,
    "transformers-batch": lambda prefix, lengths: repeated_work(prefix, lengths, padded=True),
    "prefix-grouper-kind": shared_work,
    "transformers-sequential": sequential_work,
    "prefix-grouper-readme": whole_logits_work,
    "grouped-chunked": chunked_work,
}
OURS = "grouped"
# What is measured unless --contestants says otherwise.
DEFAULT = tuple(WORK)

DESCRIPTIONS = {
    "grouped": "ours: Policy.logprobs, prefix once, grouped attention, logits of response tokens in chunks",
    "transformers-batch": "transformers' forward over the prefix repeated per response, right-padded where ragged, no "
    "mask, logits of response rows only, all at once; sdpa, on a GPU flash_attention_2 where installed",
    "transformers-sequential": "the same, one sequence after the other, gradients accumulated",
    "prefix-grouper-readme": "the package prefix_grouper as its README drives it: logits of every token, split "
    "afterwards",
    "prefix-grouper-kind": "prefix_grouper at its best: the responses' last tokens left out, hidden states split "
    "first, logits of response tokens only, in the chunks ours uses; without flash-attn (always on a CPU) the "
    "attention function of both is ours, on torch's sdpa: the package has none there",
    "grouped-chunked": f"ours, prefix once, responses in chunks of {CHUNK_TOKENS:,} tokens; memory does not grow",
}
