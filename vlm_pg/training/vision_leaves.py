"""A trained vision tower runs once a step: micro-batches see its outputs as leaves, then one backward goes through."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch

from vlm_pg.models.policy import Policy
from vlm_pg.training.distributed import max_over_ranks
from vlm_pg.types import Prompt, VisualFeatures


class VisionLeaves:
    """Visual features of one step's prompts, cut from the tower's graph where the tower trains.

    Made once per step, before generation. Gradients of all micro-batches add up in the leaves; ``surrogate_loss`` then
    carries them into the tower in a single backward. Exact: d loss / d weights = (d loss / d features)(d features / d
    weights).

    A trained tower is entered by all ranks or by none: a rank without media runs it on a blank patch, for ranks that
    gather weights and reduce gradients together must do so in step.
    """

    def __init__(self, policy: Policy, prompts: Sequence[Prompt]):
        trains = policy.vision.trains
        here = trains and any(prompt.pixel_values is not None for prompt in prompts)
        # Agreed on before the tower is entered: under ZeRO-3 its forward is a series of collectives itself.
        self.tower_due = trains and max_over_ranks({"due": float(here)}, policy.device)["due"] > 0
        self._idle = policy.idle_vision_loss() if self.tower_due and not here else None
        self._outputs = policy.vision.encode(prompts, with_graph=trains, keep_graph=True)
        self.features: list[VisualFeatures] = []
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for output in self._outputs:
            if output.features is None or not trains:
                self.features.append(output)
                continue
            # Groups with the same media share one output, so they share one leaf.
            pair = self._pairs.setdefault(
                id(output.features), (output.features, output.features.detach().requires_grad_())
            )
            self.features.append(replace(output, features=pair[1], carries_graph=False))

    def of(self, prompts: Sequence[int]) -> VisionLeaves:
        """These leaves as some of the prompts see them, by their places; gradients still add up in the same ones."""
        chosen = copy(self)
        chosen.features = [self.features[place] for place in prompts]
        return chosen

    def surrogate_loss(self, loss_scale: float) -> torch.Tensor:
        """A scalar whose gradient is what the micro-batches left in the leaves; zero on a rank without media.

        Args:
            loss_scale: what the engine multiplies losses by; the leaves hold gradients scaled once already.
        """
        if self._idle is not None:
            return self._idle
        terms = [
            (output.float() * (0.0 if leaf.grad is None else leaf.grad.float())).sum() / loss_scale
            for output, leaf in self._pairs.values()
        ]
        return torch.stack(terms).sum()
