"""A ``ServerEngine`` behind an ``OddServer``, the questions that it sends, and how it says what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from tests.support.groups import tiny_policy
from tests.support.odd_server import OddServer, Reply
from vlm_pg.errors import ServerError
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.server.contract import LoadedModel
from vlm_pg.rollout.server.divergence import Divergence
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.weights import PushedWeights
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import Prompt, Sample

QUESTIONS = 40
# Weights that a server has loaded, and never loses.
ALWAYS_THERE = {
    "confirm.return_value": [],
    "are_still.return_value": True,
    "take_divergence.return_value": Divergence(),
    "path": Path("unused"),
    "adapter": None,
    "updates": None,
}


@lru_cache(maxsize=1)
def policy() -> Policy:
    return tiny_policy()


@lru_cache(maxsize=1)
def questions() -> tuple[tuple[Prompt, ...], ChatMessages, dict[str, str]]:
    """Prompts, their messages, and the question text of each sample."""
    builder = PromptBuilder(policy().processor, PromptSettings(), policy().positions)
    samples = {f"q{i}": Sample(f"q{i}", f"Question {i}?", (), (), "1", "numerical", "t", "t") for i in range(QUESTIONS)}
    texts = {name: builder.question_text(sample) for name, sample in samples.items()}
    prompts = tuple(builder.build(sample, ()) for sample in samples.values())
    return prompts, ChatMessages(policy(), samples), texts


def is_about(reply: Reply, number: int) -> bool:
    return f"Question {number}?" in reply.asked["messages"][-1]["content"][-1]["text"]


def server_engine(
    server: OddServer,
    lines: list[str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    home: Path = Path("unused"),
    rollout: dict[str, Any] | None = None,
    **server_settings: Any,
) -> ServerEngine:
    """Three rollouts a question; ``lines``: what it logs. Unless ``weights`` is keep, the server has the policy's."""
    url = {"url": server.url, "wait_seconds": 0.0, "retries": 1, "timeout_seconds": 60.0}
    limits = {"max_answer_mb": 1.0, "max_divergence": None}
    given = {"engine": "server", "num_generations": 3, "max_new_tokens": 64, "server": url | limits | server_settings}
    settings = RolloutSettings.model_validate(given | (rollout or {}))
    log = ([] if lines is None else lines).append
    with patch("vlm_pg.rollout.server.engine.PushedWeights", lambda *_: Mock(PushedWeights, **ALWAYS_THERE)):
        return ServerEngine(LoadedModel(policy()), settings, 7, should_stop, questions()[1], home, log)


def reported(sampler: Sampler) -> dict[str, Any]:
    """The metrics of its calls since the last report."""
    tally = Tally()
    sampler.report(tally)
    return tally.reduced()


def fault_or_error(engine: ServerEngine, prompts: tuple[Prompt, ...]) -> str:
    """Why the one question has no answer: recorded where the answer is at fault, raised where the server is."""
    try:
        groups = engine.generate(prompts, 2)
    except ServerError as error:
        return str(error)
    (fault,) = engine.take_faults()
    assert groups == [()] and fault.sample_id == prompts[0].sample_id
    return fault.message
