"""In bf16 sharing must not cost accuracy: errors against fp32 beside those of transformers' own repeated forward."""

from __future__ import annotations

import pytest
import torch

from tests.support.groups import (
    Chunk,
    make_case,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.registry import FAMILIES

# Allowed error, as a multiple of the repeated path's own.
BOUND = 1.5
KINDS_USED = ("text", "images", "image+video")
USUAL = (("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", False))


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """All gradients of the language model as one fp64 vector."""
    return torch.cat([p.grad.double().flatten() for name, p in sorted(model.named_parameters()) if p.grad is not None])


@pytest.mark.parametrize(
    ("family", "chunked"),
    [
        pytest.param(family, chunked, marks=() if (family, chunked) in USUAL else pytest.mark.matrix)
        for family, chunked in [*((family, False) for family in FAMILIES), ("qwen2_5_vl", True), ("qwen3_5", True)]
    ],
)
def test_grouped_error_is_no_larger_than_repeated_error(family: str, chunked: bool) -> None:
    exact = tiny_policy(family=family)
    policy = tiny_policy(family=family, dtype=torch.bfloat16)
    # Both bf16 sides hold the same rounded weights, and so does the fp32 reference.
    exact.model.load_state_dict({k: v.float() for k, v in policy.model.state_dict().items()}, strict=False)
    reference, repeated = plain_model(exact), plain_model(policy)
    cases = [make_case(exact, kind, seed=index) for index, kind in enumerate(KINDS_USED)]
    groups = [random_group(exact, case, [30, 3, 12, 1], seed=i) for i, case in enumerate(cases)]

    def score(model: torch.nn.Module) -> list[list[torch.Tensor]]:
        model.zero_grad()
        scored = [repeated_logprobs(model, case, g.responses) for case, g in zip(cases, groups, strict=True)]
        weighted_sum(scored).backward()
        return scored

    expected, half = score(reference), score(repeated)
    ours = policy.logprobs(groups)
    if chunked:
        leaves = [response.detach().requires_grad_() for group in expected for response in group]
        slopes = iter(torch.autograd.grad(weighted_sum([leaves]), leaves))
        slope_of = [[next(slopes) for _ in group] for group in expected]

        def loss_of(chunk: Chunk) -> torch.Tensor:
            for group, part in enumerate(chunk):
                for index, values in part:
                    ours[group][index] = values.detach()
            terms = [(slope_of[g][i] * values).sum() for g, part in enumerate(chunk) for i, values in part]
            return torch.stack(terms).sum()

        backward_in_chunks(policy, groups, loss_of, chunk_tokens=25)
    else:
        weighted_sum(ours).backward()

    def error(scored: list[list[torch.Tensor]]) -> float:
        pairs = zip(_flat(scored), _flat(expected), strict=True)
        return torch.cat([(a - b).abs() for a, b in pairs]).mean().item()

    exact_gradient = gradient_of(reference)
    gradient_error = float((gradient_of(policy.model) - exact_gradient).norm())
    repeated_gradient_error = float((gradient_of(repeated) - exact_gradient).norm())
    assert error(ours) <= BOUND * error(half)
    assert gradient_error <= BOUND * repeated_gradient_error


def _flat(scored: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [response for group in scored for response in group]
