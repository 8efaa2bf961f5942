"""Every registered family: grouped equals transformers' own repeated forward, over random cases: hundreds of all
families together, and hundreds of each as a matrix.

A case is one packed stream: one to four prompts of every kind, each with 1 to 16 ragged responses. Some prompts of a
stream ask about the same media, or continue one another, so that trees of every depth occur where packing shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from tests.support.groups import (
    KINDS,
    Case,
    Chunk,
    batched_logprobs,
    continued_case,
    gradient_errors,
    make_case,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from tests.support.tiny import TEXT_FAMILY_NAMES, VL_FAMILY_NAMES
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.policy import Policy
from vlm_pg.models.prompt_tree import prompt_tree
from vlm_pg.models.registry import FAMILIES

MATRIX_CASES = range(100)  # per family and tower
CASES = (3, 8, 13, 18, 23, 33, 38, 48)  # two of each kind; trees of two levels are rare, and 48 is one
TEXT_CASES = MATRIX_CASES[:8]  # they have no towers, media or positions to vary
CASES_PER_BACKWARD = 4
GROUP_SIZES = (1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12, 16)


def small_case(policy: Policy, kind: str, rng: np.random.Generator, media_seed: int | None = None) -> Case:
    seconds = float(rng.choice([0.25, 0.5, 2.0, 30.0]))
    return make_case(policy, kind, int(rng.integers(2**31)), seconds, media_seed, max_side=2, max_words=12)


def some_tokens(policy: Policy, rng: np.random.Generator) -> torch.Tensor:
    allowed = [token for token in range(policy.vocab_size) if token not in policy.media_token_ids]
    return torch.tensor(rng.choice(allowed, int(rng.integers(1, 9))))


def unrelated(policy: Policy, rng: np.random.Generator) -> list[Case]:
    return [small_case(policy, str(rng.choice(KINDS)), rng) for _ in range(int(rng.integers(1, 4)))]


def questions_on_one_video(policy: Policy, rng: np.random.Generator) -> list[Case]:
    kind, media_seed = str(rng.choice(["video", "image", "images", "image+video"])), int(rng.integers(2**31))
    times = int(rng.integers(2**31))
    return [
        make_case(policy, kind, times + turn, 0.5, media_seed, max_side=2, max_words=12)
        for turn in range(int(rng.integers(2, 4)))
    ]


def continued(policy: Policy, rng: np.random.Generator) -> list[Case]:
    """A conversation at two or three points in time, one prompt the beginning of the next."""
    cases = [small_case(policy, str(rng.choice(KINDS)), rng)]
    for _ in range(int(rng.integers(1, 3))):
        cases.append(continued_case(policy, cases[-1], some_tokens(policy, rng)))
    return cases


def questions_continued(policy: Policy, rng: np.random.Generator) -> list[Case]:
    """Two questions on one video, the second one continued twice from its end: four levels with the responses."""
    first, second = questions_on_one_video(policy, rng)[:2]
    branches = [continued_case(policy, second, some_tokens(policy, rng)) for _ in range(2)]
    return [first, second, *branches]


MAKERS: tuple[Callable[[Policy, np.random.Generator], list[Case]], ...] = (
    unrelated,
    questions_on_one_video,
    continued,
    questions_continued,
)


@pytest.mark.parametrize(
    ("family", "train_vision"),
    [
        *((family, True) for family in VL_FAMILY_NAMES),
        *((family, False) for family in ("qwen2_5_vl", "qwen2", "qwen3_moe", "qwen3_5_text")),
    ],
)
def test_random_cases(family: str, train_vision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(family, train_vision, CASES if family in VL_FAMILY_NAMES else TEXT_CASES, monkeypatch)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "train_vision"), [*product(VL_FAMILY_NAMES, (False, True)), *product(TEXT_FAMILY_NAMES, (False,))]
)
def test_hundreds_of_random_cases(family: str, train_vision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(family, train_vision, MATRIX_CASES, monkeypatch)


def _compare(family: str, train_vision: bool, numbers: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever is shared becomes a node, however short: tiny prompts would not be worth one.
    monkeypatch.setattr("vlm_pg.models.packing.prompt_tree", partial(prompt_tree, min_shared=1))
    policy = tiny_policy(train_vision=train_vision, family=family)
    oracle = plain_model(policy)
    levels_seen = set()
    for index, number in enumerate(numbers):
        rng = np.random.default_rng([number, train_vision])
        cases = MAKERS[number % len(MAKERS)](policy, rng)
        groups = []
        for case in cases:
            lengths = rng.integers(1, 10, int(rng.choice(GROUP_SIZES)))
            groups.append(random_group(policy, case, [int(length) for length in lengths], int(rng.integers(2**31))))
        levels_seen.add(len(policy.pack(groups).tree.level_nodes))
        logprobs = policy.logprobs(groups)
        expected = [batched_logprobs(oracle, c, g.responses) for c, g in zip(cases, groups, strict=True)]
        for ours, theirs in zip(logprobs, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == b.shape
                assert (a - b).abs().max() < 1e-5, f"case {number} ({[case.prompt.sample_id for case in cases]})"
        weighted_sum(logprobs).backward()
        weighted_sum(expected).backward()
        policy.weights_changed()  # a trained tower's graph is used up
        if (index + 1) % CASES_PER_BACKWARD == 0:
            errors = gradient_errors(policy.model, oracle)
            assert len(errors) > 20
            assert max(errors.values()) < 1e-4, f"up to case {number}: {max(errors.items(), key=lambda item: item[1])}"
            policy.zero_grad()
            oracle.zero_grad()
    # Texts always begin alike, with the template's words, which are a level here.
    assert levels_seen >= ({2, 3, 4} if policy.family.reads_media else {3, 4})


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
