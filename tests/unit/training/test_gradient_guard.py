"""An optimizer that took another gradient than was computed is found out, whatever became of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlm_pg.errors import GradientMismatchError
from vlm_pg.training.deepspeed_engine import GradientGuard

BETAS = (0.9, 0.95)
MAX_NORM = 0.5


class Training:
    """Two weights under AdamW, a gradient of random numbers an update, and something that tampers with it."""

    def __init__(self, updates: int, dtype: torch.dtype = torch.float32, loss_scale: float = 1.0):
        generator = torch.Generator().manual_seed(0)
        shapes = {"tower": (6, 5), "language": (7,)}
        self.generator, self.loss_scale = generator, loss_scale
        self.weights = {
            name: torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))
            for name, shape in shapes.items()
        }
        self.masters = {name: weight.detach().float().requires_grad_() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-3, betas=BETAS)
        by_weight = {id(weight): self.masters[name] for name, weight in self.weights.items()}

        def first_moment(weight: torch.nn.Parameter) -> torch.Tensor:
            moment: torch.Tensor = self.optimizer.state[by_weight[id(weight)]]["exp_avg"]
            return moment

        self.guard = GradientGuard(self.weights, first_moment, BETAS[0], loss_scale, updates)

    def update(self, tamper: Callable[[dict[str, torch.Tensor]], Any] = lambda gradients: None) -> None:
        for _ in range(2):  # two micro-batches
            loss = sum(
                (weight * torch.randn(weight.shape, generator=self.generator).to(weight.dtype)).sum()
                for weight in self.weights.values()
            )
            assert isinstance(loss, torch.Tensor)
            (loss * self.loss_scale).backward()
        gradients = {}
        for name, weight in self.weights.items():
            assert weight.grad is not None
            gradients[name], weight.grad = weight.grad.float() / self.loss_scale, None
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients.values()])).item()
        tamper(gradients)
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient * min(1.0, MAX_NORM / (norm + 1e-6))
        self.optimizer.step()
        self.guard.after_step(norm, MAX_NORM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_computed_gradient_passes(dtype: torch.dtype) -> None:
    training = Training(updates=3, dtype=dtype, loss_scale=2.0)
    for _ in range(5):
        training.update()


def lose(gradients: dict[str, torch.Tensor]) -> None:
    gradients["tower"].zero_()


def halve(gradients: dict[str, torch.Tensor]) -> None:
    gradients["tower"].mul_(0.5)


TAMPERINGS = {
    "lost": lose,
    "halved": halve,
    "of another rank": lambda gradients: gradients["tower"].copy_(gradients["tower"].roll(1, 0)),
    "not a number": lambda gradients: gradients["tower"].view(-1)[:1].fill_(torch.nan),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
def test_a_changed_gradient_is_found(tamper: Callable[[dict[str, torch.Tensor]], Any], dtype: torch.dtype) -> None:
    training = Training(updates=3, dtype=dtype)
    training.update()
    with pytest.raises(GradientMismatchError, match=r"1 of 2 weights with another gradient.*: tower \(computed"):
        training.update(tamper)


def test_gradients_of_the_update_before_are_found() -> None:
    training = Training(updates=3)
    stale: dict[str, torch.Tensor] = {}
    training.update(lambda gradients: stale.update({name: value.clone() for name, value in gradients.items()}))
    with pytest.raises(GradientMismatchError, match="2 of 2"):
        training.update(lambda gradients: [gradients[name].add_(stale[name]) for name in stale])


def test_after_a_resume_the_first_update_is_only_read() -> None:
    training = Training(updates=3)
    training.update()
    again = GradientGuard(training.weights, training.guard._first_moment, BETAS[0], 1.0, updates=2)
    again.skip_first()
    training.guard = again
    training.update(halve)
    with pytest.raises(GradientMismatchError):
        training.update(halve)


def test_only_the_first_updates_are_watched() -> None:
    training = Training(updates=1)
    training.update()
    training.update(lose)
    assert not training.weights["tower"]._backward_hooks
    unwatched = Training(updates=0)
    unwatched.update(lose)
