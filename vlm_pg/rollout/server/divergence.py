"""How far the log-probabilities that a server reports are from the trainer's.

Servers differ in whether those are of the logits themselves or divided by the temperature, and behind filters and
penalties or before them. Where that matters, the reading that is nearer to the trainer's counts: other weights are far
from both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vlm_pg.errors import ServerError
from vlm_pg.rollout.server.dialects import REPORTING, Kind
from vlm_pg.rollout.settings import RolloutSettings

# Clamp of d in exp(d): else one token of two models that disagree would decide everything.
LOG_RATIO_CLAMP = 20.0
# Rounding stays below, in bf16 too; see ``HEALTHY`` of training.
HEALTHY_KL = 0.01
# A mean over fewer tokens is too noisy.
ENOUGH_TOKENS = 64
# One step's mean may exceed any bound through a few odd tokens.
CALLS_TO_STOP = 2

ServerLogprobs = Sequence[tuple[float, ...] | None]
TrainerLogprobs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Divergence:
    """Sums over sampled tokens of d = trainer - server, nats: ``kl`` of exp(d) - 1 - d (the k3 estimate of
    KL(server || trainer), joschu.net/blog/kl-approx), and the ``largest`` |d|."""

    tokens: int = 0
    kl: float = 0.0
    largest: float = 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(self.tokens + other.tokens, self.kl + other.kl, max(self.largest, other.largest))

    @property
    def mean(self) -> float:
        """KL per token; 0 where nothing was compared."""
        return self.kl / self.tokens if self.tokens else 0.0


def divergence(server_logprobs: ServerLogprobs, trainer_logprobs: TrainerLogprobs) -> Divergence:
    """Of the responses whose log-probabilities the server reports.

    Args:
        server_logprobs: of the first tokens of each response; None: unknown.
        trainer_logprobs: fp32 [R] of each response.
    """
    pairs = [(them, us[: len(them)]) for them, us in zip(server_logprobs, trainer_logprobs, strict=True) if them]
    if not pairs:
        return Divergence()
    server = torch.cat([torch.tensor(values, dtype=torch.float64) for values, _ in pairs])
    difference = torch.cat([values.double() for _, values in pairs]) - server
    clamped = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return Divergence(len(difference), float((torch.expm1(clamped) - clamped).sum()), float(difference.abs().max()))


class DivergenceCheck:
    """Compares the log-probabilities of calls; warns of other weights, and stops at another model's.

    Args:
        url: of the server.
        log_once: prints the first line of a topic.
    """

    def __init__(self, url: str, kind: Kind, settings: RolloutSettings, log_once: Callable[[str, str], None]):
        self._url, self._kind, self._settings, self._log_once = url, kind, settings, log_once
        self._sum = Divergence()
        # Whether reported log-probabilities are those of logits divided by the temperature; None before the first ones.
        self._is_known = settings.temperature == 1.0 or kind == "vlm_pg"
        self._is_scaled: bool | None = True if self._is_known else None
        self._has_compared = False
        self._beyond = 0

    @property
    def reports_policy(self) -> bool:
        """Whether reported log-probabilities are those of the policy at the temperature, as far as known: before any
        filter. Behind a filter they might be either, so then they are not taken for it."""
        return self._kind == "vlm_pg" or (not _filters(self._settings) and self._is_scaled is not False)

    def take(self) -> Divergence:
        """Divergence since the last call of ``take``."""
        found, self._sum = self._sum, Divergence()
        return found

    def compare(
        self,
        server_logprobs: ServerLogprobs,
        trainer_logprobs: TrainerLogprobs,
        unscaled: Callable[[], TrainerLogprobs],
        temperature: float,
        step: int | str,
    ) -> bool:
        """Compare the answers of one call; ``reports_policy`` afterwards.

        Args:
            server_logprobs: of each response, nats.
            trainer_logprobs: fp32 [R] of each response, at ``temperature``.
            unscaled: computes the same at temperature 1; called at other temperatures only.

        Raises:
            ServerError: ``CALLS_TO_STOP`` judged calls in a row exceeded ``max_divergence``.
        """
        # At a temperature other than 1 a comparison takes a scoring pass: only now and then, and to confirm an excess.
        every = self._settings.mismatch_every
        on_schedule = every > 0 and isinstance(step, int) and step % every == 0
        is_due = self._is_known or not self._has_compared or self._beyond > 0 or on_schedule
        if server_logprobs and is_due:
            self._compare(server_logprobs, trainer_logprobs, unscaled, temperature)
        if server_logprobs and not self.reports_policy:
            why = " and ".join(_filters(self._settings)) or f"rollout.temperature={temperature:g}"
            self._log_once(
                "behaviour",
                f"with {why}, the log-probabilities that the server at {self._url} reports may not be those of its "
                "policy: the loss takes the trainer's (docs/servers.md)",
            )
        return self.reports_policy

    def _compare(
        self,
        server_logprobs: ServerLogprobs,
        trainer_logprobs: TrainerLogprobs,
        unscaled: Callable[[], TrainerLogprobs],
        temperature: float,
    ) -> None:
        found = divergence(server_logprobs, trainer_logprobs)
        if not found.tokens:
            if self._kind in REPORTING:
                self._log_once(
                    "no log-probabilities",
                    f"the server at {self._url} ({self._kind}) was asked for log-probabilities and gave none that can "
                    "be compared (docs/servers.md)",
                )
            return
        self._has_compared = True
        if not self._is_known:
            raw = divergence(server_logprobs, unscaled())
            if self._is_scaled is None:
                self._is_scaled = found.kl <= raw.kl
            found = min(found, raw, key=lambda reading: reading.kl)
        self._sum += found
        if found.tokens >= ENOUGH_TOKENS:
            self._judge(found)

    def _judge(self, found: Divergence) -> None:
        limit, changing = self._settings.server.max_divergence, self._settings.extras if self._kind != "vlm_pg" else {}
        beyond = limit is not None and not found.mean <= limit and not changing
        self._beyond = self._beyond + 1 if beyond else 0
        if found.mean <= HEALTHY_KL:
            return
        figures = (
            f"its log-probabilities of {found.tokens} tokens differ from the trainer's by a KL of {found.mean:.3g} "
            f"nats a token (largest difference {found.largest:.3g})"
        )
        if changing:
            names = " and ".join(f"rollout.{name}" for name in changing)
            self._log_once(
                "weights",
                f"the server at {self._url} may sample from other weights than the trainer's, or it reports "
                f"log-probabilities behind {names}, which this run sets: {figures}. The run is not stopped for it; "
                "compare once with neutral settings (docs/servers.md)",
            )
            return
        line = f"the server at {self._url} samples from another policy than the trainer's: {figures}"
        if self._settings.server.weights == "keep":
            advice = "start it on the newest checkpoint of the run (on model.path before the first one)"
        else:
            advice = "it has the run's weights, so look for another dtype, quantization, positions or processor files"
        if self._beyond >= CALLS_TO_STOP:
            raise ServerError(
                f"{line}, in {self._beyond} calls running above rollout.server.max_divergence={limit:g}; {advice}. "
                "Then go on with run.resume=auto."
            )
        self._log_once("weights", f"{line}; {advice} (docs/servers.md)")


def _filters(settings: RolloutSettings) -> list[str]:
    """Settings that make sampled tokens come from another distribution than the policy's."""
    names = [*settings.extras, *(["top_p"] if settings.top_p < 1.0 else [])]
    return [f"rollout.{name}={getattr(settings, name):g}" for name in names]
