"""Comparison, in a run's first updates, of the gradient that the optimizer took with the computed one, for every
weight.

An engine that reduces, shards and offloads gradients can lose some of them, or add stale ones, without an error. So for
each trained weight the gradient of every backward is projected on a fixed vector as it arrives, over all ranks; after
the update the same projection is derived from Adam's first moment: (m_t - beta_1 m_{t-1}) / (1 - beta_1) is the
gradient after clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from vlm_pg.distributed import sum_over_ranks
from vlm_pg.errors import GradientMismatchError

# Relative to the norm of the sum: a lost, doubled or stale part is of its order.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
# Rounding of the first moment itself, relative to its norm.
MOMENT_TOLERANCE = 1e-5


class GradientGuard:
    """Watches some updates, then removes its hooks.

    Args:
        weights: name -> trained weight.
        first_moment: fp32 first moment of a weight, whole, on every rank. A collective.
        beta: Adam's first beta.
        loss_scale: factor of the losses, divided out by the engine.
        updates: number of updates to watch.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        first_moment: Callable[[torch.nn.Parameter], torch.Tensor],
        beta: float,
        loss_scale: float,
        updates: int,
    ):
        self._weights, self._first_moment = weights, first_moment
        self._beta, self._loss_scale, self._left = beta, loss_scale, updates
        self._computed: dict[str, torch.Tensor] = {}
        self._before: dict[str, tuple[float, float]] | None = dict.fromkeys(weights, (0.0, 0.0))
        self._hooks = [
            weight.register_hook(partial(self._seen, name)) for name, weight in weights.items() if updates > 0
        ]

    def skip_first(self) -> None:
        """After a resume, moments are not zero: the first update only reads them."""
        self._before = None

    def after_step(self, grad_norm: float, max_grad_norm: float) -> None:
        """Call after the optimizer's step, on all ranks.

        Raises:
            GradientMismatchError: the optimizer took another gradient. The weights are changed.
        """
        if not self._left:
            return
        wrong = self._compared(grad_norm, max_grad_norm)
        self._left -= 1
        if not self._left:
            for hook in self._hooks:
                hook.remove()
        if wrong:
            numbers = [f"{name} (computed {computed:.4g}, taken {taken:.4g})" for name, computed, taken in wrong[:4]]
            raise GradientMismatchError(
                f"DeepSpeed updated {len(wrong)} of {len(self._weights)} weights with another gradient than training "
                f"computed: {'; '.join(numbers)}. Numbers are projections on a fixed vector. The last update is wrong "
                "and no checkpoint of it is written. Take options out of training.deepspeed_config until this passes "
                "(configs/deepspeed/ has files that do), or use training.engine=torch, and report the file that fails."
            )

    def _compared(self, grad_norm: float, max_grad_norm: float) -> list[tuple[str, float, float]]:
        """Name, computed and taken of each weight in which they differ."""
        before, after = self._before, self._moments()
        self._before = after
        computed, self._computed = self._computed, {}
        if before is None:
            return []
        device = next(iter(self._weights.values())).device
        here = {name: _pair(computed[name]) if name in computed else (0.0, 0.0) for name in self._weights}
        sums = sum_over_ranks({f"{part}/{name}": pair[part] for name, pair in here.items() for part in (0, 1)}, device)
        factor = min(1.0, max_grad_norm / (grad_norm + 1e-6)) / self._loss_scale
        wrong = []
        for name, weight in self._weights.items():
            expected, size = sums[f"0/{name}"] * factor, sums[f"1/{name}"] * factor
            taken = (after[name][0] - self._beta * before[name][0]) / (1 - self._beta)
            allowed = TOLERANCE.get(weight.dtype, max(TOLERANCE.values())) * size
            allowed += MOMENT_TOLERANCE * (before[name][1] + after[name][1]) / (1 - self._beta)
            if not abs(taken - expected) <= allowed:
                wrong.append((name, expected, taken))
        return wrong

    def _seen(self, name: str, gradient: torch.Tensor) -> None:
        found = _projection(gradient)
        self._computed[name] = self._computed[name] + found if name in self._computed else found

    @torch.no_grad()
    def _moments(self) -> dict[str, tuple[float, float]]:
        return {name: _pair(_projection(self._first_moment(weight))) for name, weight in self._weights.items()}


@torch.no_grad()
def _projection(values: torch.Tensor) -> torch.Tensor:
    """fp64 [2]: the product with a fixed vector without symmetries, and the norm. No copy of ``values`` is made."""
    rows = values.detach().reshape(-1, values.shape[-1] if values.dim() else 1)
    # In bf16's precision, so that it is the same vector for bf16 gradients and fp32 moments.
    across = torch.cos(torch.arange(rows.shape[1], device=rows.device) * 0.739 + 0.3).bfloat16()
    down = torch.cos(torch.arange(rows.shape[0], device=rows.device) * 1.618 + 0.7)
    product = torch.mv(rows, across.to(rows.dtype)).double() @ down.double()
    return torch.stack([product, torch.linalg.vector_norm(rows, dtype=torch.float32).double()])


def _pair(values: torch.Tensor) -> tuple[float, float]:
    first, second = values.tolist()
    return first, second
