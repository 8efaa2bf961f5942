"""The tower's outputs of one step: leaves for micro-batches where it trains; the last of them goes on through it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from vlm_pg.distributed import BY_ITSELF, SequenceGroup, max_over_ranks
from vlm_pg.models.policy import Policy
from vlm_pg.types import Prompt, VisualFeatures


class StepFeatures:
    """Visual features of one step's prompts, cut from the tower's graph where the tower trains.

    Made once per step, before generation. Gradients of all passes but the last add up in the leaves; the last pass
    works on ``joined`` features instead, whose backward adds what the leaves hold and goes on through the tower. Exact:
    d loss / d weights = (d loss / d features)(d features / d weights), and the update's last backward, which engines
    may treat apart from the others, reaches language model and tower alike.

    A trained tower is entered by all ranks or by none: a rank without media runs it on a blank patch, for ranks that
    gather weights and reduce gradients together must do so in step.

    Args:
        sequence: processes that make the features of the same prompts together; each runs the tower on some frames.
    """

    def __init__(self, policy: Policy, prompts: Sequence[Prompt], sequence: SequenceGroup = BY_ITSELF):
        self._policy = policy
        self.prompts = tuple(prompts)
        trains = policy.vision.trains
        here = trains and any(prompt.pixel_values is not None for prompt in prompts)
        # Agreed on before the tower is entered: under ZeRO-3 its forward is a series of collectives itself.
        self.tower_ran = trains and max_over_ranks({"ran": float(here)}, policy.device)["ran"] > 0
        self._idle = policy.idle_vision_loss() if self.tower_ran and not here else None
        self._outputs = policy.vision.encode(prompts, trains, keep_graph=True, sequence=sequence)
        self.features: list[VisualFeatures] = []
        # Groups with the same media share one output, so they share one leaf.
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Leaf of each prompt, by the output it was cut from; None without media or graph.
        self._keys: list[int | None] = []
        for output in self._outputs:
            if output.features is None or not trains:
                self.features.append(output)
                self._keys.append(None)
                continue
            key = id(output.features)
            pair = self._pairs.setdefault(key, (output.features, output.features.detach().requires_grad_()))
            self.features.append(replace(output, features=pair[1], carries_graph=False))
            self._keys.append(key)
        # Not a reference to oneself, which would keep all this until the garbage collector comes by.
        self._everything = self.prompts, self.features, self._keys

    @classmethod
    def known(cls, policy: Policy, prompts: Sequence[Prompt], features: Sequence[VisualFeatures]) -> StepFeatures:
        """Of a frozen tower, whoever ran it."""
        found = cls(policy, ())
        found.prompts, found.features, found._keys = tuple(prompts), list(features), [None] * len(prompts)
        found._everything = found.prompts, found.features, found._keys
        return found

    def of(self, prompts: Sequence[int]) -> StepFeatures:
        """These leaves as some of the prompts see them, by their places; gradients still add up in the same ones."""
        chosen = copy(self)
        chosen.prompts = tuple(self.prompts[place] for place in prompts)
        chosen.features = [self.features[place] for place in prompts]
        chosen._keys = [self._keys[place] for place in prompts]
        return chosen

    def of_everything(self, prompts: Sequence[Prompt]) -> StepFeatures:
        """As ``of``, of prompts that these were made for from the beginning, by their sample ids."""
        whole = copy(self)
        whole.prompts, whole.features, whole._keys = self._everything
        places = {prompt.sample_id: place for place, prompt in enumerate(whole.prompts)}
        return whole.of([places[prompt.sample_id] for prompt in prompts])

    def by_sample(self) -> dict[str, VisualFeatures]:
        """By sample id, of all prompts that these were made for from the beginning."""
        prompts, features, _ = self._everything
        return {prompt.sample_id: item for prompt, item in zip(prompts, features, strict=True)}

    def joined(self) -> tuple[list[VisualFeatures], torch.Tensor | None]:
        """For the update's last pass: features with the tower's graph behind them, and a zero to add to its loss.

        Backward through that loss enters the tower once, with the gradients left in the leaves and those of the pass
        itself, also where the pass reads none of the features. Without media the tower runs on a blank patch. The zero
        is None where the tower is frozen.
        """
        if not self._policy.vision.trains:
            return self.features, None
        if not self._pairs:
            return self.features, self._idle if self._idle is not None else self._policy.idle_vision_loss()
        outputs, leaves = zip(*self._pairs.values(), strict=True)
        zero, *tensors = _JoinLeaves.apply(leaves, *outputs)
        by_key = dict(zip(self._pairs, tensors, strict=True))
        features = [
            item if key is None else replace(item, features=by_key[key], carries_graph=True)
            for item, key in zip(self.features, self._keys, strict=True)
        ]
        return features, zero


class _JoinLeaves(torch.autograd.Function):
    """A zero and the outputs themselves; backward adds each leaf's gradient to that of its output."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[torch.Tensor], *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.leaves = leaves
        ctx.set_materialize_grads(False)
        zero = torch.zeros((), device=outputs[0].device)
        return zero, *(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        results: list[torch.Tensor | None] = []
        for leaf, gradient in zip(ctx.leaves, grad_outputs[1:], strict=True):
            left, leaf.grad = leaf.grad, None
            if left is None:
                # The tower's backward must run on every rank that entered it, whatever reads its outputs.
                left = torch.zeros_like(leaf) if gradient is None else gradient
            elif gradient is not None:
                left = left + gradient
            results.append(left)
        return None, *results
