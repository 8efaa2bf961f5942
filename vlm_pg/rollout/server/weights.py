"""Whether a server samples from the trainer's weights: judged by what it says it sampled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlm_pg.rollout.server.dialects import Kind, processors
from vlm_pg.rollout.server.divergence import ENOUGH_TOKENS, HEALTHY_KL, Divergence, divergence
from vlm_pg.rollout.server.errors import ServerError
from vlm_pg.rollout.settings import RolloutSettings

# A few odd tokens of one step may carry its mean beyond any bound.
CALLS_TO_STOP = 2
# These are asked for log-probabilities.
TELLING: tuple[Kind, ...] = ("vllm", "sglang")

ServerLogprobs = Sequence[tuple[float, ...] | None]
Scored = Sequence[torch.Tensor]


class WeightsCheck:
    """Compares every call's log-probabilities, warns of other weights, and stops where they are another model's.

    Args:
        url: of the server.
        tell_once: shows a line of a topic, the first time.
    """

    def __init__(self, url: str, kind: Kind, settings: RolloutSettings, tell_once: Callable[[str, str], None]):
        self._url, self._kind, self._settings, self._tell_once = url, kind, settings, tell_once
        self._sum = Divergence()
        self._compared = False
        self._beyond = 0

    def take(self) -> Divergence:
        """How far the server's log-probabilities lay from the trainer's since the last call."""
        found, self._sum = self._sum, Divergence()
        return found

    def compare(
        self, said: ServerLogprobs, scored: Scored, unscaled: Callable[[], Scored], temperature: float, step: int | str
    ) -> None:
        """Judge the answers of one call.

        Args:
            said: the server's log-probabilities of each response, nats.
            scored: fp32 [R] of each response: the trainer's, at ``temperature``.
            unscaled: makes the same at temperature 1; called where the temperature is another one.

        Raises:
            ServerError: ``CALLS_TO_STOP`` judged calls running differed by more than ``max_divergence``.
        """
        if not said or not self._due(temperature, step):
            return
        found = divergence(said, scored)
        if not found.tokens:
            self._tell_of_silence()
            return
        self._compared = True
        if temperature != 1.0:
            found = min(found, divergence(said, unscaled()), key=lambda reading: reading.kl)
        self._sum += found
        if found.tokens >= ENOUGH_TOKENS:
            self._judge(found)

    def _due(self, temperature: float, step: int | str) -> bool:
        """At a temperature other than 1 comparing takes a scoring pass: now and then, and to confirm what was found."""
        every = self._settings.mismatch_every
        now_and_then = every > 0 and isinstance(step, int) and step % every == 0
        return temperature == 1.0 or not self._compared or self._beyond > 0 or now_and_then

    def _judge(self, found: Divergence) -> None:
        limit, changing = self._settings.server.max_divergence, processors(self._settings)
        beyond = limit is not None and found.mean > limit and not changing
        self._beyond = self._beyond + 1 if beyond else 0
        if found.mean <= HEALTHY_KL:
            return
        figures = (
            f"its log-probabilities of {found.tokens} tokens differ from the trainer's by a KL of {found.mean:.3g} "
            f"nats a token (largest difference {found.largest:.3g})"
        )
        if changing:
            names = " and ".join(f"rollout.{name}" for name in changing)
            self._tell_once(
                "weights",
                f"the server at {self._url} may sample from other weights than the trainer's, or it reports "
                f"log-probabilities behind {names}, which this run sets: {figures}. The run is not stopped for it; "
                "compare once with neutral settings (docs/servers.md)",
            )
            return
        line = f"the server at {self._url} samples from other weights than the trainer's: {figures}"
        if self._beyond >= CALLS_TO_STOP:
            raise ServerError(
                f"{line}, in {self._beyond} calls running above rollout.server.max_divergence={limit:g}. Start it on "
                "the newest checkpoint of the run (on model.path before the first one) and go on with run.resume=auto."
            )
        self._tell_once("weights", f"{line}; start it on the newest checkpoint now and then (docs/servers.md)")

    def _tell_of_silence(self) -> None:
        if self._kind in TELLING:
            self._tell_once(
                "no log-probabilities",
                f"the server at {self._url} ({self._kind}) was asked for log-probabilities and gave none that can be "
                "compared: whether it has the trainer's weights is not checked (docs/servers.md)",
            )
