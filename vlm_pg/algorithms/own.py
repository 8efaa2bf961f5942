"""The loss and the advantage estimator that the settings name, ready to be called.

What a function of the user's own is called with and what it gives is checked; those of the registry are trusted.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from vlm_pg.algorithms.advantages import GroupRewards, effective_scale
from vlm_pg.algorithms.losses import LossAndMetrics, TokenLoss
from vlm_pg.algorithms.registry import ESTIMATORS, LOSSES
from vlm_pg.algorithms.settings import OF_STEP, AlgorithmSettings
from vlm_pg.errors import ConfigError
from vlm_pg.functions import load_function
from vlm_pg.metrics import RESERVED_KEYS, Metric


@dataclass(frozen=True)
class Estimator:
    """Rewards of groups to the advantage of each rollout; ``of_step``: all of the step, over all ranks, at once."""

    of_groups: Callable[[Sequence[GroupRewards]], list[list[float]]]
    of_step: bool


def load_loss(settings: AlgorithmSettings) -> TokenLoss:
    """The loss that ``algorithm.loss`` names, of response tokens alone.

    Raises:
        ConfigError: it cannot be found, imported, or called as losses are; when called: it gave something else than a
            loss with a graph and its metrics.
    """
    if settings.loss in LOSSES:
        if "dual_clip" in LOSSES[settings.loss].only and settings.dual_clip is not None:
            raise ConfigError(LOSSES[settings.loss].only["dual_clip"][1])
        return partial(load_function(LOSSES[settings.loss].function, "algorithm.loss"), settings=settings)
    own = _Own.load(settings.loss, "algorithm.loss", "algorithm.loss_arguments", settings.loss_arguments)
    own.require_parameters("(tokens, settings, ...)", "tokens")
    return lambda tokens: _checked_loss(own, own.function(tokens, settings=settings, **own.arguments))


def load_estimator(settings: AlgorithmSettings) -> Estimator:
    """What ``algorithm.advantages`` names.

    Raises:
        ConfigError: as of ``load_loss``, or ``prune_fill`` would change the statistics of a step; when called: it gave
            something else than one number per rollout.
    """
    name, setting = settings.advantages, "algorithm.advantages"
    if name in ESTIMATORS:
        function = partial(load_function(ESTIMATORS[name].function, setting), settings=settings)
        return Estimator(function, effective_scale(settings) in OF_STEP)
    own = _Own.load(name, setting, "algorithm.advantage_arguments", settings.advantage_arguments)
    own.require_parameters("(group, settings, ...) or (groups, settings, ...)", "group", "groups")
    of_step = own.parameters[0] == "groups"
    if of_step and settings.prune_rate and settings.prune_fill:
        raise ConfigError(
            f"{setting} is '{name}', which asks for all groups of a step, and algorithm.prune_fill adds further ones "
            "after advantages are made. Set algorithm.prune_fill=false, or let the function ask for one group."
        )

    def of_groups(groups: Sequence[GroupRewards]) -> list[list[float]]:
        call = partial(own.function, settings=settings, **own.arguments)
        return _checked_advantages(own, call(groups) if of_step else list(map(call, groups)), groups)

    return Estimator(of_groups, of_step)


@dataclass(frozen=True)
class _Own:
    """A function of the user's own, by the setting that names it; ``arguments``: of the setting ``key``."""

    function: Callable[..., Any]
    name: str
    setting: str
    key: str
    arguments: Mapping[str, Any]
    parameters: tuple[str, ...]
    metrics: dict[str, Metric] = field(default_factory=dict)  # whose names are known to be free

    @classmethod
    def load(cls, name: str, setting: str, key: str, arguments: Mapping[str, Any]) -> _Own:
        function = load_function(name, setting)
        try:
            parameters = tuple(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            raise ConfigError(
                f"The function '{name}' of {setting} does not say what its parameters are, as functions written in C "
                "may not. Write a function around it."
            ) from None
        return cls(function, name, setting, key, arguments, parameters)

    def require_parameters(self, form: str, *first: str) -> None:
        """It can be called with the two that every such function gets, and with the arguments of the settings."""
        try:
            if self.parameters[:1] not in [(name,) for name in first] or self.parameters[1:2] != ("settings",):
                raise TypeError(f"its parameters are ({', '.join(self.parameters)})")
            inspect.signature(self.function).bind(None, settings=None, **self.arguments)
        except TypeError as error:
            raise ConfigError(
                f"The function '{self.name}' of {self.setting} cannot be called: {error}. {form} is expected; further "
                f"parameters have a default or are given by {self.key}, which is {dict(self.arguments)}. Correct one "
                "of the two."
            ) from None

    def refuse(self, came: str, expected: str) -> NoReturn:
        raise ConfigError(f"The function '{self.name}' of {self.setting} gave {came}. {expected} Correct the function.")


def _checked_loss(own: _Own, result: Any) -> LossAndMetrics:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        own.refuse(_described(result), "A tuple of the loss and {Metric: value} is expected.")
    loss, metrics = result
    wide = (torch.float32, torch.float64)
    if not isinstance(loss, torch.Tensor) or loss.ndim or loss.dtype not in wide or not loss.requires_grad:
        own.refuse(
            f"{_described(loss)} as loss",
            "A float32 or float64 tensor of no dimension is expected, with the graph of tokens.policy_logprobs.",
        )
    values = {}
    for metric, given in metrics.items():
        value = torch.as_tensor(given, device=loss.device) if isinstance(given, int | float) else given
        if not isinstance(metric, Metric) or not isinstance(value, torch.Tensor) or value.ndim:
            own.refuse(
                f"{_described(value)} for {metric!r} ({type(metric).__name__})",
                "The key of a metric is a vlm_pg.metrics.Metric, its value a number or a tensor of no dimension.",
            )
        if own.metrics.get(metric) is not metric and _is_taken(metric):
            own.refuse(f"the metric {metric!r}", "vlm_pg logs another one under that name: choose a name of its own.")
        own.metrics[metric] = metric
        values[metric] = value.detach().to(loss.device)
    return loss, values


def _is_taken(metric: Metric) -> bool:
    """Whether it is another metric than the one of vlm_pg's that is logged under its name."""
    modules = [module for name, module in sys.modules.items() if name.startswith("vlm_pg.")]
    known = [value for module in modules for value in vars(module).values() if isinstance(value, Metric)]
    taken = any(metric == one or (one.endswith("/") and metric.startswith(one)) for one in (*RESERVED_KEYS, *known))
    return taken and not any(metric is one for one in known)


def _checked_advantages(own: _Own, found: Any, groups: Sequence[GroupRewards]) -> list[list[float]]:
    shape = [len(group.totals) for group in groups]
    expected = f"One finite number for each rollout is expected, 0 for a reward of None; rollouts by group: {shape}."
    try:
        values = [[float(value) for value in of_group] for of_group in found]
    except (TypeError, ValueError) as error:
        own.refuse(f"{_described(found)} ({error})", expected)
    if [len(of_group) for of_group in values] != shape:
        own.refuse(f"{[len(of_group) for of_group in values]} advantages by group", expected)
    for of_group, group in zip(values, groups, strict=True):
        for value, total in zip(of_group, group.totals, strict=True):
            if not math.isfinite(value) or (total is None and value):
                own.refuse(f"{value} for the reward {total}", expected)
    return values


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}, {value.dtype}, with{'' if value.requires_grad else 'out'} graph"
    return f"{str(value)[:80]} ({type(value).__name__})"
