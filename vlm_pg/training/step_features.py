"""The tower's outputs of one step: leaves for micro-batches where it trains; the last of them goes on through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlm_pg.distributed import BY_ITSELF, SequenceGroup, max_over_ranks
from vlm_pg.models.policy import Policy
from vlm_pg.training.feature_route import FeatureRoute
from vlm_pg.types import Prompt, VisualFeatures


@dataclass(frozen=True)
class _Cut:
    """What the tower gave for the media ``media_key``, and the leaf that passes work on in its place.

    ``media_key`` "": a zero from the tower, of which no pass knows.
    """

    output: torch.Tensor
    leaf: torch.Tensor
    media_key: str


@dataclass(frozen=True)
class _Away:
    """``leaves``: of what other data ranks made, by the key of its media; ``nothing`` as in ``Arrived``."""

    route: FeatureRoute
    leaves: Mapping[str, torch.Tensor]
    nothing: torch.Tensor


class StepFeatures:
    """Visual features of one step's prompts, cut from the tower's graph where the tower trains.

    Made once per step, before generation. Gradients of all passes but the last add up in the leaves; the last pass
    works on ``joined`` features instead, whose backward adds what the leaves hold and goes on through the tower. Exact:
    d loss / d weights = (d loss / d features)(d features / d weights), and the update's last backward, which engines
    may treat apart from the others, reaches language model and tower alike.

    A trained tower is entered by all ranks or by none: a rank without frames to run it on takes a blank patch, for
    ranks that gather weights and reduce gradients together must do so in step.

    Args:
        sequence: processes that make the features of the same prompts together; each runs the tower on some frames.
        everyone: all processes, if a tower that trains has an equal part of all frames to do on each.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        sequence: SequenceGroup = BY_ITSELF,
        everyone: SequenceGroup = BY_ITSELF,
    ):
        self._policy = policy
        self.prompts = tuple(prompts)
        trains = policy.vision.trains
        here = trains and any(prompt.pixel_values is not None for prompt in prompts)
        # Agreed on before the tower is entered: under ZeRO-3 its forward is a series of collectives itself.
        self.tower_ran = trains and max_over_ranks({"ran": float(here)}, policy.device)["ran"] > 0
        # A way into the tower where no feature leads there.
        self._zero: torch.Tensor | None = None
        if self.tower_ran and everyone.size > 1:
            self._outputs, self._zero = policy.vision.encode_together(prompts, sequence, everyone)
        else:
            self._zero = policy.idle_vision_loss() if self.tower_ran and not here else None
            self._outputs = policy.vision.encode(prompts, trains, keep_graph=True, sequence=sequence)
        # Groups with the same media share one output, so they share one leaf.
        self._cuts: dict[int, _Cut] = {}
        self._away: _Away | None = None
        self.features: list[VisualFeatures] = []
        for prompt, output in zip(prompts, self._outputs, strict=True):
            if output.features is None or not trains:
                self.features.append(output)
                continue
            known = self._cuts.get(id(output.features))
            cut = known or _Cut(output.features, output.features.detach().requires_grad_(), prompt.content_key)
            self._cuts[id(output.features)] = cut
            self.features.append(replace(output, features=cut.leaf, carries_graph=False))
        # Not a reference to oneself, which would keep all this until the garbage collector comes by.
        self._everything = self.prompts, self.features

    def of(self, prompts: Sequence[int]) -> StepFeatures:
        """These leaves as some of the prompts see them, by their places; gradients still add up in the same ones."""
        return self._with([self.prompts[place] for place in prompts], [self.features[place] for place in prompts])

    def of_prompts(self, prompts: Sequence[Prompt]) -> StepFeatures:
        """As ``of``, by their sample ids."""
        return self._with(prompts, _by_sample(self.prompts, self.features, prompts))

    def of_everything(self, prompts: Sequence[Prompt]) -> StepFeatures:
        """As ``of_prompts``, of prompts that these were made for from the beginning."""
        return self._with(prompts, _by_sample(*self._everything, prompts))

    def dealt(self, prompts: Sequence[Prompt], route: FeatureRoute) -> StepFeatures:
        """As ``of``, of prompts whose media were encoded here or come by ``route``. A collective.

        The gradient of what came returns to where it was made, as part of the last pass's backward.
        """
        vision = self._policy.vision
        here = zip(*self._everything, strict=True)
        by_media = {prompt.content_key: item for prompt, item in here if item.features is not None}
        made = {key: item.features for key, item in by_media.items() if item.features is not None}
        arrived = route.carry(made, self._policy.device)
        leaves = {key: tensor.requires_grad_(vision.trains) for key, tensor in arrived.features.items()}
        by_media |= {key: VisualFeatures(leaf, vision.version, carries_graph=False) for key, leaf in leaves.items()}
        nothing = VisualFeatures(None, vision.version, carries_graph=False)
        found = [nothing if prompt.pixel_values is None else by_media[prompt.content_key] for prompt in prompts]
        dealt = self._with(prompts, found)
        dealt._away = _Away(route, leaves, arrived.nothing)
        return dealt

    def joined(self) -> tuple[list[VisualFeatures], torch.Tensor | None]:
        """For the update's last pass: features with the tower's graph behind them, and a zero to add to its loss.

        Backward through that loss enters the tower once, with the gradients left in the leaves, here and on other
        ranks, and those of the pass itself, also where the pass reads none of the features. The zero is None where
        the tower is frozen.
        """
        if not self._policy.vision.trains:
            return self.features, None
        cuts = list(self._cuts.values())
        zero = self._zero if cuts or self._zero is not None else self._policy.idle_vision_loss()
        if zero is not None:
            cuts.append(_Cut(zero, torch.zeros_like(zero), ""))
        leaves = [cut.leaf for cut in cuts] + list(self._away.leaves.values() if self._away else ())
        zero, *tensors = _JoinLeaves.apply(cuts, self._away, *(cut.output for cut in cuts))
        by_leaf = {id(leaf): tensor for leaf, tensor in zip(leaves, tensors, strict=True)}
        features = [
            item if item.features is None else replace(item, features=by_leaf[id(item.features)], carries_graph=True)
            for item in self.features
        ]
        return features, zero

    def _with(self, prompts: Sequence[Prompt], features: Sequence[VisualFeatures]) -> StepFeatures:
        chosen = copy(self)
        chosen.prompts, chosen.features = tuple(prompts), list(features)
        return chosen


def _by_sample(
    prompts: Sequence[Prompt], features: Sequence[VisualFeatures], wanted: Sequence[Prompt]
) -> list[VisualFeatures]:
    found = {prompt.sample_id: item for prompt, item in zip(prompts, features, strict=True)}
    return [found[prompt.sample_id] for prompt in wanted]


class _JoinLeaves(torch.autograd.Function):
    """A zero, the outputs themselves and what came from elsewhere; backward adds what the leaves of each hold.

    Made after everything that runs before the last pass and before all of that pass, so autograd comes to it between
    the language model and the tower: on all ranks at the same place among their collectives. Where gradients return to
    other ranks, these wait there for each other's passes.
    """

    @staticmethod
    def forward(ctx: Any, cuts: Sequence[_Cut], away: _Away | None, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.cuts, ctx.away = cuts, away
        ctx.set_materialize_grads(False)
        zero = torch.zeros((), device=outputs[0].device)
        arrived = [] if away is None else [leaf.detach() for leaf in away.leaves.values()]
        return zero, *(output.view_as(output) for output in outputs), *arrived

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cuts, away = ctx.cuts, ctx.away
        own, of_arrived = grad_outputs[1 : 1 + len(cuts)], grad_outputs[1 + len(cuts) :]
        returned: Mapping[str, torch.Tensor] = {}
        if away is not None:
            arrived = zip(away.leaves.items(), of_arrived, strict=True)
            owed = {key: _owed(leaf, gradient) for (key, leaf), gradient in arrived}
            returned = away.route.bring_back(owed, away.nothing)
        results = [
            _owed(cut.leaf, gradient, returned.get(cut.media_key)) for cut, gradient in zip(cuts, own, strict=True)
        ]
        return None, None, *results


def _owed(leaf: torch.Tensor, *gradients: torch.Tensor | None) -> torch.Tensor:
    """The sum of what the leaf holds, which it gives away, and of gradients; in fp32 where there are several.

    Zeros where there is none: the tower's backward must run on every rank that entered it, whatever reads its outputs.
    """
    left, leaf.grad = leaf.grad, None
    first, *others = [part for part in (left, *gradients) if part is not None] or [torch.zeros_like(leaf)]
    for other in others:
        first = first.to(torch.promote_types(leaf.dtype, torch.float32)) + other
    return first.to(leaf.dtype)
