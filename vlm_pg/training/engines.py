"""Gradients and optimizer states: the interface, and torch's engine, which has all of them on every rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlm_pg.distributed import (
    SINGLE_RANK,
    SINGLE_SP_RANK,
    RankLayout,
    SequenceGroup,
    gather_objects,
    max_over_ranks,
    sum_tensors_over_ranks,
)
from vlm_pg.errors import CheckpointError, NotFiniteError
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import Part
from vlm_pg.models.weights import not_finite
from vlm_pg.training.optimizer_states import OptimizerStates, TorchStates, read_states, write_states
from vlm_pg.training.settings import TrainingSettings

if TYPE_CHECKING:
    from vlm_pg.training.parallel import Parallel

# Of one file of weights: rank 0 holds so much beside its share while sharded weights are saved.
SHARD_BYTES = 5 * 10**9


def trained_weights(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and weights, in the model's order."""
    return [(name, weight) for name, weight in policy.model.named_parameters() if weight.requires_grad]


class PartRates:
    """Groups of trained weights with one learning rate, in the order of the model's parts; parts of equal rates are one
    group."""

    def __init__(self, policy: Policy, settings: TrainingSettings):
        self._of_name = policy.family.part_of
        self.parts = policy.family.trained_parts(policy.model)
        self._settings = settings
        self._rates = list(dict.fromkeys(self._peak(part) for part in self.parts))

    def groups(self, weights: Sequence[torch.Tensor], names: Sequence[str]) -> list[dict[str, Any]]:
        """As optimizers take them; ``names``: of the weights, in order."""
        rates = [self._peak(self._of_name(name)) for name in names]
        return [
            {"params": [w for w, of_weight in zip(weights, rates, strict=True) if of_weight == rate], "lr": rate}
            for rate in self._rates
        ]

    def set(self, groups: Sequence[dict[str, Any]], learning_rate: float) -> None:
        """Set an optimizer's groups to a step's ``learning_rate``, or the same share of their own peak."""
        for group, peak in zip(groups, self._rates, strict=True):
            group["lr"] = self._scaled(peak, learning_rate)

    def of_parts(self, learning_rate: float) -> dict[Part, float]:
        """Each trained part's rate in a step with this ``learning_rate``."""
        return {part: self._scaled(self._peak(part), learning_rate) for part in self.parts}

    def _peak(self, part: Part) -> float:
        return self._settings.learning_rates.get(part, self._settings.learning_rate)

    def _scaled(self, peak: float, learning_rate: float) -> float:
        return learning_rate * (peak / self._settings.learning_rate)


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 1.

    Linear warm-up over ``warmup_steps`` (the first step already moves), then constant, linear or cosine decay that
    reaches ``min_learning_rate_ratio`` of the peak at the last step.
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    falling = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * falling)


class Engine(ABC):
    """Accumulates gradients over backward calls and applies them in one step.

    ``module`` is the policy, possibly wrapped, and called as ``Policy.forward``. Losses carry weights that sum to 1
    over all ranks, so gradients are added up over ranks, never averaged.
    """

    policy: Policy
    module: Callable[..., Any]
    ranks: RankLayout = SINGLE_RANK
    parallel: Parallel | None = None  # None for one process
    # The processes that share this one's token streams.
    sequence: SequenceGroup = SINGLE_SP_RANK
    # All processes, if they divide the frames of a trained tower.
    everyone: SequenceGroup = SINGLE_SP_RANK
    description: str
    # Factor by which backward() multiplies losses.
    loss_scale: float = 1.0
    # Whether the first and the last backward of an update must reach every trained weight, with zeros if need be.
    needs_every_weight: bool = False
    rates: PartRates

    def __init__(self, policy: Policy, settings: TrainingSettings, ranks: RankLayout):
        self.policy, self.ranks = policy, ranks
        self.sequence = SequenceGroup.of(ranks)
        self.rates = PartRates(policy, settings)
        if ranks.world_size > 1:
            from vlm_pg.training.parallel import Parallel

            self.parallel = Parallel(self)
            if settings.balance and ranks.data_size > 1 and policy.settings.share_prefix:
                self.everyone = SequenceGroup.of_all(ranks)

    @abstractmethod
    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add this loss's gradient; ``last`` marks the step's final call."""

    @abstractmethod
    def step(self, learning_rate: float) -> float:
        """Clip, update the weights, clear the gradients; the gradient's global norm before clipping.

        Args:
            learning_rate: of parts without a peak of their own; others are scaled alike.

        Raises:
            NotFiniteError: the norm is not finite, and weights and optimizer state are untouched; or the updated
                weights are not finite, on any rank.
        """

    def part_norms(self) -> dict[Part, float]:
        """The last step's gradient norm of each trained part, if the engine has whole gradients."""
        return {}

    @property
    @abstractmethod
    def states(self) -> OptimizerStates:
        """The optimizer's states, of which this rank holds some or all."""

    def save_optimizer(self, folder: Path) -> None:
        """Write the states that a bitwise resume needs beside the weights; called on every rank."""
        states = self.states
        if self.policy.weights_version and not states.updates:
            raise RuntimeError("The optimizer has no states after an update, or keeps them elsewhere.")
        write_states(folder, states, self.ranks)

    def load_optimizer(self, folder: Path) -> None:
        """The inverse, on a policy with the checkpoint's weights; the writing layout may be another one.

        Raises:
            CheckpointError: they are of other weights, not whole, or cannot be read.
        """
        updates = read_states(folder, self.states)
        if self.policy.weights_version and not updates:
            raise CheckpointError(
                f"{folder} holds no optimizer states, and its weights have had {self.policy.weights_version} updates. "
                "Resume from another checkpoint."
            )
        self._states_loaded(updates)

    @abstractmethod
    def _states_loaded(self, updates: int) -> None:
        """Called when states of so many updates have been loaded."""

    def save_weights(self, folder: Path) -> None:
        """Write the model, or its adapter alone, as ``save_pretrained`` does; called on every rank."""
        if self.ranks.is_rank0:
            self.policy.model.save_pretrained(folder, max_shard_size=SHARD_BYTES)

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Inside, ranks use the policy independently, without gradients and without other collectives: the weights may
        be gathered in lockstep."""
        yield

    @contextmanager
    def gathered(self, weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """These weights are whole on every rank inside. A collective."""
        yield

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """``policy.model.state_dict()`` is whole inside, at least on rank 0."""
        yield


def keeps_masters(policy: Policy, trained: Iterable[torch.Tensor]) -> bool:
    """Whether a checkpoint holds fp32 copies of the trained weights, the same for every engine: an adapter's weights in
    a bf16 model are fp32 under one and bf16 under another."""
    return policy.dtype != torch.float32 or any(weight.dtype != torch.float32 for weight in trained)


def check_finite(norm: float) -> None:
    if not 0 <= norm < float("inf"):
        raise NotFiniteError(
            f"The gradient norm is {norm}; the step was not taken and no checkpoint was written. Resume from the last "
            "checkpoint with a lower training.learning_rate, or look at the last rollouts for what went wrong."
        )


def check_updated(policy: Policy, found: Sequence[str]) -> None:
    """Call after an update, before anything reads the weights. A collective.

    Args:
        found: weights with NaN or infinities on this rank.

    Raises:
        NotFiniteError: there are some, on any rank.
    """
    if not max_over_ranks({"weights": float(len(found))}, policy.device)["weights"]:
        return
    names = sorted({name for of_rank in gather_objects(found) for name in of_rank})
    raise NotFiniteError(
        f"Update {policy.weights_version + 1} has left NaN or infinities in {len(names)} weights (the first is "
        f"{names[0]}), although loss and gradient are finite. Nothing was saved since. Resume from the last checkpoint "
        "with a lower training.learning_rate; where that ends alike, from an earlier one."
    )


class TorchEngine(Engine):
    """AdamW, all weights on every rank. bf16 weights have an fp32 copy that takes gradients and updates.

    Gradients are summed over ranks once, in fp32, at the update's end. Every rank then makes the same step.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings, ranks: RankLayout = SINGLE_RANK):
        super().__init__(policy, settings, ranks)
        self.module = policy
        self.description = "torch" if ranks.world_size == 1 else "torch (all weights on every rank)"
        self._max_grad_norm = settings.max_grad_norm
        self._named = trained_weights(policy)
        self._weights: list[torch.Tensor] = [p for _, p in self._named]
        self._has_masters = any(p.dtype != torch.float32 for p in self._weights)
        self._masters = [p.detach().float().clone() for p in self._weights] if self._has_masters else self._weights
        self._part_norms: dict[Part, float] = {}
        self._optimizer = torch.optim.AdamW(
            self.rates.groups(self._masters, [name for name, _ in self._named]),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
        )

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()
        if self._has_masters:
            # bf16 has 8 bits of mantissa: sums over micro-batches are kept in fp32.
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight.grad is not None:
                    gradient = weight.grad.float()
                    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                    weight.grad = None

    def step(self, learning_rate: float) -> float:
        for master in self._masters:
            # A weight without gradient (the tower, if all questions were text) gets zeros, as under DeepSpeed: Adam's
            # moments and weight decay still apply.
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        if self.ranks.world_size > 1:
            sum_tensors_over_ranks([master.grad for master in self._masters if master.grad is not None])
        self._part_norms = self._compute_part_norms()
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm))
        check_finite(norm)
        self.rates.set(self._optimizer.param_groups, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._has_masters:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)
        check_updated(self.policy, not_finite(self._named))
        self.policy.weights_changed()
        return norm

    def part_norms(self) -> dict[Part, float]:
        return self._part_norms

    def _compute_part_norms(self) -> dict[Part, float]:
        if len(self.rates.parts) == 1:
            return {}
        gradients: dict[Part, list[torch.Tensor]] = {part: [] for part in self.rates.parts}
        for (name, _), master in zip(self._named, self._masters, strict=True):
            assert master.grad is not None
            gradients[self.policy.family.part_of(name)].append(master.grad)
        return {part: float(torch.nn.utils.get_total_norm(found)) for part, found in gradients.items()}

    @property
    def states(self) -> OptimizerStates:
        trained = dict(zip((name for name, _ in self._named), self._masters, strict=True))
        return TorchStates(trained, self._optimizer, keeps_masters(self.policy, self._weights), self.ranks)

    def _states_loaded(self, updates: int) -> None:
        if self._has_masters:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)
