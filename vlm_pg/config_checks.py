"""Settings of several sections that cannot go together; those of one section stand beside it (``Settings.impossible``).

Each function takes the sections it looks at, and returns what is wrong, one message a fault.
"""

from __future__ import annotations

from collections.abc import Iterable

from vlm_pg.algorithms.pruning import num_kept
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.cache.settings import CacheSettings
from vlm_pg.data.settings import DataSettings
from vlm_pg.eval.settings import EvalSettings
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.settings import TrainingSettings


def _found(checks: Iterable[tuple[bool, str]]) -> list[str]:
    return [message for impossible, message in checks if impossible]


def generation_faults(rollout: RolloutSettings, training: TrainingSettings, model: ModelSettings) -> list[str]:
    """How the processes of a data rank share generation."""
    ranks, divides = training.sequence_parallel, rollout.divide_prefix == "always"
    checks = (
        (
            rollout.split == "prompts" and (ranks == 1 or rollout.engine == "server" or not model.share_prefix),
            "rollout.split is prompts, which is for training.sequence_parallel above 1 with rollout.engine=in_process "
            "and model.share_prefix=true. Set rollout.split=auto.",
        ),
        (
            divides and (ranks == 1 or rollout.engine == "server" or not model.share_prefix),
            "rollout.divide_prefix is always, which is for training.sequence_parallel above 1 with "
            "rollout.engine=in_process and model.share_prefix=true. Set rollout.divide_prefix=auto.",
        ),
        (
            divides and (rollout.split == "questions" or rollout.gather == "layers"),
            "rollout.divide_prefix is always, so that processes sample every question together, but rollout.split is "
            f"{rollout.split} and rollout.gather is {rollout.gather}. Set rollout.split=auto and rollout.gather=all, "
            "or rollout.divide_prefix=auto.",
        ),
        (
            divides and rollout.num_generations < ranks,
            f"rollout.divide_prefix is always with training.sequence_parallel={ranks}, but there are only "
            f"{rollout.num_generations} rollouts of a question to share. Set rollout.num_generations={ranks} or more, "
            "or rollout.divide_prefix=auto.",
        ),
        (
            rollout.split == "prompts" and rollout.num_generations < ranks,
            f"rollout.split is prompts with training.sequence_parallel={ranks}, but there are only "
            f"{rollout.num_generations} rollouts of a question to share. Set rollout.num_generations={ranks} or more, "
            "or rollout.split=questions.",
        ),
        (
            rollout.split == "prompts" and rollout.gather == "layers",
            "rollout.split is prompts and rollout.gather is layers: a process that waits for another one's prompt "
            "would hold up its weights. Set rollout.split=questions or rollout.gather=all.",
        ),
    )
    return _found(checks)


def budget_faults(prompt: PromptSettings, rollout: RolloutSettings, training: TrainingSettings) -> list[str]:
    """Lengths against the token budget of a micro-batch."""
    longest = prompt.max_prompt_tokens + rollout.max_new_tokens
    checks = (
        (
            training.micro_batch_tokens < longest,
            f"training.micro_batch_tokens is {training.micro_batch_tokens}, but one prompt "
            f"(prompt.max_prompt_tokens={prompt.max_prompt_tokens}) with one response "
            f"(rollout.max_new_tokens={rollout.max_new_tokens}) may need {longest}. "
            f"Set training.micro_batch_tokens={longest} or more, or lower the other two.",
        ),
    )
    return _found(checks)


def weight_faults(model: ModelSettings, training: TrainingSettings, cache: CacheSettings) -> list[str]:
    """What trains, at which rate, and what is kept of it."""
    checks = (
        *(
            (
                part not in model.train,
                f"training.learning_rates.{part} is {rate}, but model.train is [{', '.join(model.train)}], so "
                f"that part is frozen and has no rate. Add {part} to model.train, or leave its rate out.",
            )
            for part, rate in training.learning_rates.items()
        ),
        (
            bool(cache.features) and model.trains_vision,
            f"cache.features is true and model.train is [{', '.join(model.train)}], so that visual features "
            "change with every update and none could be used again. Set cache.features=false or leave it out, or leave "
            "tower and merger out of model.train.",
        ),
        (
            bool(cache.features) and not model.share_prefix,
            "cache.features is true and model.share_prefix is false, where everything is computed anew for comparison. "
            "Set cache.features=false or leave it out, or model.share_prefix=true.",
        ),
    )
    return _found(checks)


def evaluation_faults(evaluation: EvalSettings, data: DataSettings, training: TrainingSettings) -> list[str]:
    """Evaluation sets, and when they are run."""
    checks = (
        (
            bool(evaluation.every) and not evaluation.chosen_sets(list(data.eval)),
            f"eval.every is {evaluation.every} and there is no evaluation set to run. Name sets in data.eval, or set "
            "eval.every=0.",
        ),
        (
            training.keep_best == "eval/accuracy"
            and (
                not evaluation.every
                or training.checkpoint_every % evaluation.every != 0
                or training.steps % evaluation.every != 0
            ),
            f"training.keep_best is eval/accuracy, with eval.every={evaluation.every}, "
            f"training.checkpoint_every={training.checkpoint_every} and training.steps={training.steps}: "
            "every checkpoint needs an accuracy of its own, the last one too. Set eval.every so that it divides both.",
        ),
        (
            evaluation.sets == () and bool(data.eval),
            "eval.sets is empty, so that nothing would be evaluated. Name sets of data.eval in it, or set it to null "
            "for all; without evaluation, eval.before=false and eval.after=false.",
        ),
    )
    return _found(checks) + _unknown_sets(evaluation, data)


def _unknown_sets(evaluation: EvalSettings, data: DataSettings) -> list[str]:
    named = [("eval.sets", name) for name in evaluation.sets or ()]
    named += [("eval.control_sets", name) for name in evaluation.control_sets or ()]
    named += [("eval.protocols", name) for name in evaluation.protocols]
    if evaluation.headline_set is not None:
        named.append(("eval.headline_set", evaluation.headline_set))
    known = ", ".join(data.eval) or "none"
    return [
        f"{key} names {name!r}, which is not an evaluation set. Sets in data.eval: {known}. "
        f"Add data.eval.{name}=PATH or change {key}."
        for key, name in named
        if name not in data.eval
    ]


def algorithm_faults(algorithm: AlgorithmSettings, rollout: RolloutSettings, training: TrainingSettings) -> list[str]:
    """The algorithm with what surrounds it."""
    checks = (
        (
            rollout.num_generations < 2 and algorithm.baseline != "none" and not algorithm.own_advantages,
            f"rollout.num_generations is {rollout.num_generations}, and algorithm.baseline="
            f"{algorithm.baseline} compares the rollouts of a group, so at least 2 are needed. Set "
            "rollout.num_generations=2 or more, or algorithm.preset=reinforce_pp.",
        ),
        (
            algorithm.importance_cap is not None and rollout.logprobs != "recompute",
            f"algorithm.importance_cap is {algorithm.importance_cap} and rollout.logprobs is {rollout.logprobs}, so "
            "that both log-probabilities it compares are the same ones. Set rollout.logprobs=recompute.",
        ),
        (
            algorithm.importance_cap is not None and rollout.engine == "server",
            "algorithm.importance_cap is set and rollout.engine is server, whose rollouts the trainer scores itself: "
            "there is nothing to weigh. Set algorithm.importance_cap=null.",
        ),
        (
            algorithm.temporal_bonus > 0 and rollout.engine == "server",
            "algorithm.temporal_bonus is set and rollout.engine is server: a server reads the media file itself and "
            "cannot be shown its frames in another order. Set rollout.engine=in_process or algorithm.temporal_bonus=0.",
        ),
        (
            algorithm.length_bonus > 0 and algorithm.length_bonus_tokens[0] > rollout.max_new_tokens,
            f"algorithm.length_bonus goes to responses of {algorithm.length_bonus_tokens[0]} tokens and more, and "
            f"rollout.max_new_tokens is {rollout.max_new_tokens}, so nobody can earn it. Set "
            "algorithm.length_bonus_tokens to shorter ones, or algorithm.length_bonus=0.",
        ),
        (
            algorithm.resample_rounds > 0 and rollout.num_generations < 2,
            "algorithm.resample_rounds replaces groups whose rewards are all equal, and rollout.num_generations is 1: "
            "one reward always is. Set algorithm.resample_rounds=0.",
        ),
        (
            algorithm.minibatches > training.prompts_per_step,
            f"algorithm.minibatches is {algorithm.minibatches}, more than training.prompts_per_step="
            f"{training.prompts_per_step}. Set it to that or less.",
        ),
    )
    problems = _found(checks)
    if algorithm.prune_rate > 0:
        try:
            num_kept(rollout.num_generations, algorithm.prune_rate)
        except ValueError as error:
            problems.append(f"algorithm.prune_rate with rollout.num_generations: {error}")
    return problems
