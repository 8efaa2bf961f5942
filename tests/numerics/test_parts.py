"""Parts of a model that train beside parts that do not: values, gradients and updates are those of plain autograd.

The oracle is transformers' own model with the same weights frozen, run over every prompt + response by itself, and
torch's AdamW with a group of weights for each part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from tests.support.groups import (
    Case,
    Chunk,
    chunk_loss,
    gradient_errors,
    make_case,
    plain_model,
    random_group,
    repeated_logprobs,
    tiny_policy,
)
from tests.support.tiny import VL_FAMILY_NAMES
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import PARTS, Part
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.rates import trained_weights
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
from vlm_pg.types import ResponseGroup

SUBSETS: list[tuple[Part, ...]] = [*((part,) for part in PARTS), *itertools.combinations(PARTS, 2)]
SHAPES = [("video", [5, 1, 9]), ("text", [3, 8]), ("image", [4, 1]), ("images", [6, 2])]
RATES: dict[Part, float] = {"tower": 2e-4, "merger": 5e-3}


def named(train: Sequence[Part]) -> str:
    return "+".join(train)


def groups_of(policy: Policy) -> list[tuple[Case, ResponseGroup]]:
    cases = [(make_case(policy, kind, seed), lengths, seed) for seed, (kind, lengths) in enumerate(SHAPES)]
    return [(case, random_group(policy, case, lengths, seed)) for case, lengths, seed in cases]


def check(policy: Policy, chunk_tokens: int | None = None) -> None:
    """Values and all gradients of one batch; nothing else has one."""
    oracle = plain_model(policy)
    pairs = groups_of(policy)
    expected = [repeated_logprobs(oracle, case, group.responses) for case, group in pairs]
    chunk_loss([list(enumerate(group)) for group in expected]).backward()

    def loss_of(chunk: Chunk) -> torch.Tensor:
        assert all((v - expected[g][i]).abs().max() < 1e-5 for g, group in enumerate(chunk) for i, v in group)
        return chunk_loss(chunk)

    backward_in_chunks(policy, [group for _, group in pairs], loss_of, chunk_tokens)
    family = policy.family
    reached = {family.part_of(n) for n, p in policy.model.named_parameters() if p.grad is not None}
    assert reached == set(policy.settings.train)
    errors = gradient_errors(policy.model, oracle)
    assert max(errors.values()) < 1e-4, max(errors, key=lambda name: errors[name])
    some = [p.grad for name, p in oracle.named_parameters() if p.grad is not None]
    assert min(sum(float(g.norm()) > 0 for g in some), len(errors)) > 3, "there should be something to compare"


@pytest.mark.parametrize("train", SUBSETS, ids=named)
def test_values_and_gradients_of_every_subset(train: tuple[Part, ...]) -> None:
    check(tiny_policy(train=train))
    check(tiny_policy(train=train, gradient_checkpointing=True), chunk_tokens=12)


@pytest.mark.parametrize(
    "family, train",
    [
        pytest.param(family, train, marks=[] if index == 22 else pytest.mark.matrix, id=f"{family}-{named(train)}")
        for index, (family, train) in enumerate(itertools.product(VL_FAMILY_NAMES, SUBSETS))
    ],
)
def test_every_family(family: str, train: tuple[Part, ...]) -> None:
    """Whole, in chunks, recomputed, and with the tower in pieces."""
    for chunk_tokens, checkpointing in itertools.product((None, 12), (False, True)):
        policy = tiny_policy(family=family, train=train, gradient_checkpointing=checkpointing)
        if checkpointing:
            policy.use_memory(MemoryChoice(mlp_tile_rows=16, vision_piece_tokens=4))
        check(policy, chunk_tokens)


def test_a_batch_without_media_has_no_gradient_and_does_no_harm() -> None:
    policy = tiny_policy(train=("merger",))
    group = random_group(policy, make_case(policy, "text", 1), [3, 4], seed=1)
    policy.logprobs([group])[0][0].sum().backward()
    assert all(p.grad is None for p in policy.model.parameters())
    with torch.no_grad():
        assert not policy.logprobs([group])[0][0].requires_grad


def test_frozen_blocks_keep_nothing_for_backward() -> None:
    """Behind frozen blocks the graph of the features is the merger's; and of frozen layers no input is saved."""
    saved = {train: _saved_bytes(tiny_policy(train=train)) for train in (("merger",), ("tower", "merger"))}
    merger = tiny_policy().model.model.visual.merger
    widths = sum(m.in_features for m in merger.modules() if isinstance(m, torch.nn.Linear))
    tokens = 64
    assert saved[("merger",)] < 4 * tokens * widths * 4 < saved[("tower", "merger")]


def _saved_bytes(policy: Policy) -> int:
    grid = torch.tensor([[4, 8, 8]])
    pixels = torch.randn(int(grid.prod()), policy.pixels.empty_token(policy.device)[0].shape[1])
    sizes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = policy.run_tower(pixels, grid)
    assert features.requires_grad
    return sum(sizes.values())


def _settings(**values: object) -> TrainingSettings:
    defaults = {"steps": 4, "learning_rate": 1e-3, "adam_epsilon": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return TrainingSettings.model_validate(defaults | values)


class RecordingEngine(TorchEngine):
    """Stores the gradients that the optimizer is about to use."""

    def step(self, learning_rate: float) -> float:
        pairs = zip(self._named, self._masters, strict=True)
        self.gradients = {n: torch.zeros_like(m) if m.grad is None else m.grad.clone() for (n, _), m in pairs}
        return super().step(learning_rate)


def _updated(policy: Policy, settings: TrainingSettings, budget: int, factors: Sequence[float]) -> None:
    """Updates, each beside the same one by hand: global clipping, and torch's AdamW with a group for each part."""
    train, family = policy.settings.train, policy.family
    engine = RecordingEngine(policy, settings)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    copies = {name: torch.nn.Parameter(before[name].float()) for name, _ in trained_weights(policy)}
    optimizer = torch.optim.AdamW(
        [
            {"params": [c for n, c in copies.items() if family.part_of(n) == part], "lr": settings.learning_rate}
            for part in train
        ],
        betas=settings.betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )
    for factor in factors:
        rate = settings.learning_rate * factor
        metrics = update_policy(
            engine, None, Update(make_groups(policy), rate), UpdateSettings(AlgorithmSettings(), budget)
        )
        for name, copy in copies.items():
            copy.grad = engine.gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(copies.values()), settings.max_grad_norm)
        for part, group in zip(train, optimizer.param_groups, strict=True):
            ratio = settings.learning_rates.get(part, settings.learning_rate) / settings.learning_rate
            group["lr"] = rate * ratio
        optimizer.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        if len(train) > 1:
            squares = sum(metrics[f"grad_norm/{part}"] ** 2 for part in train)
            assert squares**0.5 == pytest.approx(metrics["grad_norm"], rel=1e-5)
            assert {part: metrics[f"lr/{part}"] for part in train} == {
                part: group["lr"] for part, group in zip(train, optimizer.param_groups, strict=True)
            }
        for name, weight in policy.model.named_parameters():
            expected = copies[name].to(weight.dtype) if name in copies else before[name]
            assert torch.equal(weight, expected), name


@pytest.mark.parametrize("train", SUBSETS, ids=named)
def test_updates_are_adamw_with_a_group_for_each_part(train: tuple[Part, ...]) -> None:
    """Frozen weights stay equal bit for bit; clipping goes by the norm over all parts; a schedule scales all alike."""
    rates = {part: rate for part, rate in RATES.items() if part in train}
    _updated(tiny_policy(train=train), _settings(learning_rates=rates), 110, (1.0, 0.5))


@pytest.mark.parametrize("train", [("merger",), ("tower", "language"), PARTS], ids=named)
def test_updates_in_bf16_in_chunks(train: tuple[Part, ...]) -> None:
    policy = tiny_policy(train=train, dtype=torch.bfloat16, gradient_checkpointing=True)
    rates = {part: rate for part, rate in RATES.items() if part in train}
    _updated(policy, _settings(learning_rates=rates), 102, (1.0, 0.25))


@pytest.mark.parametrize("train", [("merger",), ("tower", "language")], ids=named)
def test_cuts_do_not_change_an_update(train: tuple[Part, ...]) -> None:
    """Micro-batches, chunks and recomputation; the text group is a micro-batch of its own, without any gradient."""
    found = []
    for budget, checkpointing in ((10_000, False), (110, False), (102, True)):
        policy = tiny_policy(train=train, gradient_checkpointing=checkpointing)
        engine = RecordingEngine(policy, _settings())
        update_policy(engine, None, Update(make_groups(policy), 1e-3), UpdateSettings(AlgorithmSettings(), budget))
        found.append(engine.gradients)
    for cut in found[1:]:
        for name, gradient in found[0].items():
            assert (cut[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-6), name


def test_an_update_of_text_alone_while_the_tower_trains() -> None:
    """Its gradient is zero: Adam's moments decay and weights move on by them, as without media beside a trained LLM."""
    policy = tiny_policy(train=("tower", "merger"))
    engine = TorchEngine(policy, _settings())
    text = [group for group in make_groups(policy) if group.prompt.grid_thw is None]
    before = policy.vision.version
    metrics = update_policy(engine, None, Update(text, 1e-3), UpdateSettings(AlgorithmSettings(), 10_000))
    assert metrics["grad_norm"] == 0 and policy.vision.version > before
