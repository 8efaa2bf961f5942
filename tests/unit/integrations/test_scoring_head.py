"""The output head of another trainer's model computes as its trainer says, however many rows it is asked for."""

from __future__ import annotations

import torch

from tests.support.groups import make_case, random_group
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.integrations.scoring import GroupedScorer


def test_a_head_in_fp32_behind_a_model_in_bf16() -> None:
    """Rows in chunks and all at once: logits in fp32, and gradients that differ in the order of sums alone."""
    model = tiny_model("qwen2_5_vl", tie_word_embeddings=False).to(torch.bfloat16)
    model.lm_head.float()
    scorer = GroupedScorer(model, tiny_processor("qwen2_5_vl"), fp32_head=True)
    case = make_case(scorer.policy, "text", seed=1)
    group = random_group(scorer.policy, case, [5, 4], seed=1)
    found = []
    for rows in (100, 4):
        scorer.policy.logits_chunk_rows = rows
        logprobs = scorer(model, [group], 1.0).logprobs
        (grad,) = torch.autograd.grad(logprobs.sum(), model.lm_head.weight)
        assert grad.dtype == torch.float32
        found.append((logprobs, grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
