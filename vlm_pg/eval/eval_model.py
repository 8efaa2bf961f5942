"""The model that questions are put to: weights in this process or behind a server, and what its answers need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_pg.config import RunConfig
from vlm_pg.distributed import SINGLE_RANK, RankLayout, disconnect, join_ranks, local_device
from vlm_pg.eval.batches import MAX_BATCH_QUESTIONS, batches_of, max_visual_tokens
from vlm_pg.eval.eval_set import EvalSet
from vlm_pg.models.feature_cache import keep_features
from vlm_pg.models.loading import WeightlessPolicy, load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import PromptOptions, SourcePool
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.threads import use_threads
from vlm_pg.types import Prompt, Sample
from vlm_pg.watch.watch import RankWatch

if TYPE_CHECKING:
    from vlm_pg.answers.whole import WholeReader
    from vlm_pg.eval.server_evaluation import ServerEvaluation


@dataclass(frozen=True)
class EvalModel:
    """A policy, and what its answers need: prompts and rewards as in training.

    ``whole``: reads whole outputs. ``ranks``: take batches of questions round-robin. ``gathered_parameters``: entered
    around sampling. ``sampler_of``: the sampler of a set; None: the policy itself, which must have its weights then.
    ``stop_requests``: ends running requests of samplers that work in another process; they sample one batch while the
    prompts of the next are made.
    """

    policy: Policy | WeightlessPolicy
    sources: SourcePool
    rewarder: Rewarder
    whole: WholeReader
    ranks: RankLayout = SINGLE_RANK
    gathered_parameters: Callable[[], AbstractContextManager[None]] = nullcontext
    should_stop: Callable[[], bool] = lambda: False
    sampler_of: Callable[[EvalSet], Sampler] | None = None
    stop_requests: Callable[[], None] | None = None

    def sampler(self, item: EvalSet, config: RunConfig) -> Sampler:
        """The sampler of a set."""
        if self.sampler_of is not None:
            return self.sampler_of(item)
        assert isinstance(self.policy, Policy)
        return RolloutEngine(self.policy, item.rollout(config), item.seed(config), self.should_stop)

    def batches(self, item: EvalSet, config: RunConfig, asking: PromptOptions | None = None) -> list[list[Sample]]:
        """The batches of this rank. ``asking``: of a set with prompts of its own."""
        rollout, media = item.rollout(config), config.media if asking is None else asking.media
        size = min(max(1, rollout.max_batch_rollouts // rollout.num_generations), MAX_BATCH_QUESTIONS)
        if self.stop_requests is not None:
            # A server's answers do not depend on the batch: enough to keep all requests in flight.
            in_flight = rollout.server.concurrency
            size = max(in_flight, min(2 * in_flight, MAX_BATCH_QUESTIONS))
        tokens_of = partial(max_visual_tokens, media=media, factor=self.policy.pixel_factor)
        batches = batches_of(item.samples, size, tokens_of, shares_media=item.tampers == (None,))
        return batches[self.ranks.rank :: self.ranks.world_size]


@contextmanager
def joined_ranks(config: RunConfig) -> Iterator[RankLayout]:
    """Processes that a launcher started, connected during the block; an error of one ends all."""
    quiet_libraries()
    use_threads(config.training.torch_threads)
    join_ranks()
    with RankWatch(RankLayout.here()) as watch:
        try:
            yield RankLayout.here()
        except BaseException as error:
            watch.fail(error)
            raise
        disconnect()


def open_policy(
    config: RunConfig, path: Path, console: Console
) -> tuple[Policy | WeightlessPolicy, ServerEvaluation | None]:
    """The policy at ``path``; with ``rollout.engine=server`` without weights, and the server.

    Raises:
        ServerError: the server does not answer, or is of no known kind.
    """
    if config.rollout.engine == "server":
        from vlm_pg.eval.server_evaluation import ServerEvaluation

        settings = config.model.model_copy(update={"path": str(path)})
        # With a tokenizer of its own: requests are sent in another thread than prompts are made in.
        server = ServerEvaluation(config, path, WeightlessPolicy(settings), console.warn)
        console.info(*server.introduction())
        return WeightlessPolicy(settings), server
    policy = load_policy(path, device=local_device(), settings=config.model)
    console.info(f"model: {path}; attention kernel {policy.kernel.name} (checked: {policy.kernel_error:.0e})")
    console.info(f"positions: {policy.family.describe_positions(config.model.positions)}")
    if line := keep_features(policy, config.cache):
        console.info(line)
    return policy, None


@contextmanager
def opened_model(
    config: RunConfig,
    policy: Policy | WeightlessPolicy,
    server: ServerEvaluation | None,
    ranks: RankLayout,
    console: Console,
) -> Iterator[EvalModel]:
    """The policy with decoding and grading processes, which end with the block."""
    from vlm_pg.answers.whole import WholeReader  # not for training

    def check(prompt: Prompt) -> None:
        policy.check_length(prompt, config.rollout.max_new_tokens)

    builder = PromptBuilder(policy.processor, config.prompt, policy.positions)
    with (
        SourcePool(builder, config.data, config.media, policy.pixel_factor, check, cache=config.cache) as sources,
        Rewarder(config.reward, warn=console.warn) as rewarder,
        WholeReader(config.reward, console.warn) as whole,
    ):
        model = EvalModel(policy, sources, rewarder, whole, ranks)
        yield model if server is None else replace(model, sampler_of=server.sampler, stop_requests=server.stop)
