"""A fixed question, whose sampled answers show which weights a server has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vlm_pg.errors import AnswerError
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.rollout.server.client import RUN_GOES_ON
from vlm_pg.rollout.server.dialects import VLLM_FRAMES_PER_SECOND, ServerInfo
from vlm_pg.rollout.server.divergence import Divergence, divergence
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.remote import make_generator
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import DecodedMedia, MediaKind, MediaRef, Prompt, ResponseGroup, Sample

PROBE_RESPONSES, PROBE_TOKENS, PROBE_SIDE, PROBE_FRAMES = 4, 16, 4, 4
PROBE_QUESTION = "Describe the colours of this picture, from left to right, and count to twenty."
# More tokens than vLLM's blocks of keys and values (128 on a CPU): only whole ones are in its prefix cache.
PROBE_REPEATED = 8
# For servers of this package.
ENGINE_SETTINGS = ("memory_gb", "max_batch_rollouts", "cuda_graphs", "fused_kernels", "prefill_tokens", "merge_adapter")


class Probed(NamedTuple):
    """``num_tokens`` of the prompt; whether the answers are ``exact``; how far their log-probabilities are apart."""

    num_tokens: int
    exact: bool
    divergence: Divergence


class Probe:
    """Rollouts of one fixed question, whose log-probabilities are compared with the policy's.

    Sampled at temperature 1 without filters and penalties, where every server reports the same log-probabilities. A
    picture is the same each time, so that features of an earlier tower in a server's cache are noticed.

    Args:
        settings, seed, should_stop, log, advice, server: as in ``ServerGenerator``, for the server at ``url``.
        count, max_new_tokens: of the rollouts.
    """

    def __init__(
        self,
        policy: Policy,
        settings: RolloutSettings,
        server: ServerInfo,
        url: str,
        seed: int,
        should_stop: Callable[[], bool],
        log: Callable[[str], None],
        advice: str = RUN_GOES_ON,
        count: int = PROBE_RESPONSES,
        max_new_tokens: int = PROBE_TOKENS,
    ):
        of_engine = {name: getattr(settings, name) for name in ENGINE_SETTINGS}
        plain = RolloutSettings(
            num_generations=count, max_new_tokens=max_new_tokens, server=settings.server.of_url(url), **of_engine
        )
        self._policy, messages = policy, ChatMessages(policy, {})
        self.generator = make_generator(policy, plain, seed, should_stop, messages, log, server, advice)
        self._scorer = PolicyScorer(policy, settings.prefill_tokens, should_stop)

    def ask(self, step: str, kind: MediaKind | None = "image") -> Probed:
        """About this kind of medium, under a key that seeds the rollouts.

        Raises:
            ServerError, SampleError: as ``Generator.generate``; AnswerError: the server gave no valid answer.
        """
        prompt = probe_prompt(self._policy, kind)
        (answers,) = self.generator.generate([prompt], step)
        if isinstance(answers, AnswerError):
            raise answers
        group = ResponseGroup(prompt, tuple(torch.tensor(answer.token_ids) for answer in answers))
        (scores,) = self._scorer.score([group], 1.0)
        found = divergence([answer.logprobs for answer in answers], scores)
        return Probed(prompt.num_tokens, all(answer.exact for answer in answers), found)

    def compare(self, step: str, model_name: str | None = None) -> Divergence:
        """As ``ask``, about a picture; ``model_name``: of an adapter, None for the server's model."""
        self.generator.model_name = model_name or self.generator.model_name
        return self.ask(step).divergence


def probe_prompt(policy: Policy, kind: MediaKind | None = "image") -> Prompt:
    """A question about an image of noise, or a video of some frames, of the least size that the processor leaves as it
    is; with ``kind=None``, or for a model that reads no media, about nothing."""
    media: list[DecodedMedia] = []
    if policy.family.reads_media and kind is not None:
        factor = policy.pixel_factor
        processor = policy.processor.image_processor if kind == "image" else policy.processor.video_processor
        least = getattr(processor, "size", {}).get("shortest_edge", 0)
        side = factor * max(PROBE_SIDE, int(np.ceil(np.sqrt(least) / factor)))
        frames = 1 if kind == "image" else PROBE_FRAMES
        pixels = np.random.default_rng(0).integers(0, 256, (frames, 3, side, side), dtype=np.uint8)
        seconds = tuple(index / VLLM_FRAMES_PER_SECOND for index in range(frames))
        media.append(DecodedMedia(kind, pixels, seconds, 0.0 if kind == "image" else VLLM_FRAMES_PER_SECOND, "noise"))
    sample = Sample(
        "probe",
        " ".join([PROBE_QUESTION] * PROBE_REPEATED),
        tuple(MediaRef(item.kind, "noise") for item in media),
        (),
        "noise",
        "free_form",
        "probe",
        "probe",
    )
    return PromptBuilder(policy.processor, PromptSettings(), policy.positions).build(sample, media)
