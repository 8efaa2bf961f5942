"""A collector over a tiny policy and made-up questions, with rewards that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support.groups import make_case
from vlm_pg.config import RunConfig
from vlm_pg.data.sample_sets import EpochOrder
from vlm_pg.models.policy import Policy
from vlm_pg.rewards.parts import Response
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.scoring import PolicyScorer
from vlm_pg.training.collect import Collector, Stages
from vlm_pg.training.engines import Engine, TorchEngine
from vlm_pg.training.phases import Phases
from vlm_pg.training.questions import QuestionStream, TrainingData
from vlm_pg.training.setup import make_control_sampler
from vlm_pg.types import BadSample, MediaRef, Prompt, RewardBreakdown, Sample

Reward = Callable[[Response, int], float | None]


class MadeUpRewards:
    """As ``Rewarder``: the accuracy is ``reward(response, number of the response in its group)``."""

    def __init__(self, reward: Reward):
        self.reward = reward
        self.weights = {"accuracy": 1.0, "format": 0.0}
        self.failures: dict[str, int] = {}
        self.first_errors: dict[str, str] = {}

    def accuracies(self, responses: Sequence[Response], should_stop: Any = None) -> list[float | None]:
        return [reward.total for reward in self.score(responses)]

    def score(self, responses: Sequence[Response], should_stop: Any = None) -> list[RewardBreakdown]:
        seen: dict[str, int] = {}
        found = []
        for response in responses:
            index = seen.get(response.sample.sample_id, 0)
            seen[response.sample.sample_id] = index + 1
            value = self.reward(response, index)
            found.append(RewardBreakdown(value, {"accuracy": value, "format": 1.0}))
        return found


class MadeUpPrompts:
    """As ``PromptSource``: random prompts; tampered ones of the same sample have other pixels.

    ``media_of``: number of a sample's media; samples of one kind and number have equal ones.
    """

    def __init__(self, policy: Policy, kinds: Sequence[str], media_of: Callable[[int], int] = int):
        self.policy, self.kinds, self.media_of = policy, kinds, media_of
        self.tampered: list[str] = []

    def expect(self, samples: Sequence[Sample]) -> None:
        pass

    def load(
        self, samples: Sequence[Sample], tamper: Any = None, should_stop: Any = None
    ) -> tuple[list[tuple[Sample, Prompt]], list[BadSample]]:
        questions = []
        for sample in samples:
            number = int(sample.sample_id.split("-")[-1])
            media = self.media_of(number)
            media_seed = media if tamper is None else 1000 + media
            self.tampered += [sample.sample_id] if tamper is not None else []
            case = make_case(self.policy, self.kinds[number % len(self.kinds)], seed=number, media_seed=media_seed)
            questions.append((sample, case.prompt))
        return questions, []


def made_up_samples(count: int, kinds: Sequence[str], media_of: Callable[[int], int] = int) -> list[Sample]:
    samples = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        media = (MediaRef(kind, f"{media_of(number)}.bin"),) if kind in ("image", "video") else ()
        samples.append(Sample(f"{kind}-{number}", "?", media, (), "A", "exact", "test", "test"))
    return samples


def tiny_config(algorithm: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """A configuration for made-up questions."""
    values: dict[str, Any] = {
        "model": {"path": "tiny"},
        "data": {"train": "none.jsonl", "shuffle": False},
        "rollout": {"num_generations": 4, "max_new_tokens": 6},
        "training": {"steps": 9, "prompts_per_step": 4},
        "algorithm": algorithm or {},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunConfig.model_validate(values)


def made_up_collector(
    policy: Policy,
    config: RunConfig,
    reward: Reward,
    num_samples: int = 40,
    kinds: Sequence[str] = ("text",),
    reference: Policy | None = None,
    engine: Engine | None = None,
    media_of: Callable[[int], int] = int,
    sampler: Sampler | None = None,
    source: Any = None,
    on_bad: Callable[[int, Sequence[BadSample]], None] = lambda tried, bad: None,
) -> Collector:
    """``engine``, ``sampler``: by default torch's, of one process, and in it; ``source``: ``MadeUpPrompts``."""
    engine = engine or TorchEngine(policy, config.training)
    source = source or MadeUpPrompts(policy, kinds, media_of)
    sampler = sampler or RolloutEngine(policy, config.rollout, config.run.seed)
    rewarder: Any = MadeUpRewards(reward)
    stages = Stages(
        QuestionStream(
            config,
            TrainingData(made_up_samples(num_samples, kinds, media_of), EpochOrder(num_samples), source),
            0,
            on_bad,
            engine.ranks,
        ),
        sampler,
        make_control_sampler(config, policy, sampler, lambda: False),
        rewarder,
        None if reference is None else PolicyScorer(reference, config.rollout.prefill_tokens),
    )
    return Collector(config, engine, stages, Phases())
