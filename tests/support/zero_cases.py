"""Settings under which DeepSpeed must train exactly what one torch process trains, and the data they train on."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.groups import make_case, random_group
from tests.support.layouts import weights
from tests.support.ranks import connected_ranks
from tests.support.tiny import tiny_model, tiny_processor
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.distributed import RankLayout, barrier
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import PARTS, ModelSettings, Part
from vlm_pg.training.engines import Engine
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
from vlm_pg.types import Rollout, RolloutGroup

STEPS, MATRIX_STEPS = 3, 5
LEARNING_RATE = 1e-3
RATES: dict[Part, float] = {"tower": 5e-4, "merger": 2e-3}
# Two updates a step; each of two ranks has two groups in an update.
MEDIA = (("video", "image", "images", "video"), ("text", "video", "image+video", "image"))
TEXT = (("text",) * 4, ("text",) * 4)
TEXT_STEPS = (1, 3)
LENGTHS = ([5, 1, 9], [4, 4, 6], [3, 8, 2], [6, 2, 7])


# Metrics that must be those of one process, summed over all updates.
COMPARED = ("loss", "grad_norm", "entropy")


@dataclass(frozen=True)
class ZeroCase:
    stage: int
    ranks: int
    overlap: bool
    offload: str  # none, optimizer, parameters (and optimizer)
    train: tuple[Part, ...]
    tied: bool
    chunked: bool
    text_steps: bool
    # Weights in bf16 beside fp32 masters: rounding differs by order, so only what an update took can be compared.
    bf16: bool = False
    steps: int = STEPS
    # Tower and merger at learning rates of their own.
    rates: bool = False

    @property
    def stop_after(self) -> int:
        """Steps after which a checkpoint is written, from which a second run goes on."""
        return self.steps - 2

    @property
    def name(self) -> str:
        return "-".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def in_one_process(self) -> ZeroCase:
        """What one torch process needs to know of it."""
        return ZeroCase(
            1, 1, False, "none", self.train, self.tied, False, self.text_steps, False, self.steps, self.rates
        )

    def deepspeed(self, own_cpu_adam: bool = False) -> dict[str, Any]:
        """DeepSpeed's file. ``own_cpu_adam``: DeepSpeed's optimizer for CPUs, which is compiled first."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.overlap}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "parameters":
            zero["offload_param"] = {"device": "cpu"}
        if self.stage == 3:
            # No weight is too small to be scattered.
            zero["stage3_param_persistence_threshold"] = 0
        return {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": own_cpu_adam}


LEVELS: dict[str, tuple[Any, ...]] = {
    "stage": (1, 2, 3),
    "ranks": (1, 2),
    "overlap": (False, True),
    "offload": ("none", "optimizer", "parameters"),
    "train": (("language",), PARTS),
    "tied": (True, False),
    "chunked": (False, True),
    "text_steps": (False, True),
}


def all_cases() -> list[ZeroCase]:
    """Every combination that DeepSpeed has: parameters can be offloaded in stage 3 only."""
    cases = [ZeroCase(*values) for values in itertools.product(*LEVELS.values())]
    return [case for case in cases if case.offload != "parameters" or case.stage == 3]


def pairwise_cases() -> list[ZeroCase]:
    """Few cases in which every pair of values of two settings occurs: the one with most new pairs, again and again."""
    left = set().union(*(_pairs(case) for case in all_cases()))
    chosen = []
    while left:
        best = max(all_cases(), key=lambda case: len(_pairs(case) & left))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def part_cases() -> list[ZeroCase]:
    """Each subset of the parts, at several learning rates, in every stage; on two ranks, some updates without media."""
    subsets = [parts for n in (1, 2, 3) for parts in itertools.combinations(PARTS, n) if parts != ("language",)]
    return [
        ZeroCase(stage, 2, not chunked, offload, train, chunked, chunked, True, rates=True)
        for stage, offload, train, chunked in itertools.product(
            (1, 2, 3), ("none", "optimizer"), subsets, (True, False)
        )
    ]


def _pairs(case: ZeroCase) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in LEVELS], 2))


def case_policy(case: ZeroCase, state: dict[str, torch.Tensor] | None = None) -> Policy:
    model = tiny_model(tie_word_embeddings=case.tied)
    if state is not None:
        model.load_state_dict(state, strict=False)
    if case.bf16:
        model = model.to(torch.bfloat16)
    settings = ModelSettings(path="tiny", train=case.train, gradient_checkpointing=case.chunked)
    policy = make_policy(model, tiny_processor(), settings)
    if case.chunked:
        # Ranks with unequally many response tokens would call the output head unequally often.
        policy.logits_chunk_rows = 6
    return policy


def training_settings(case: ZeroCase, **values: Any) -> TrainingSettings:
    rates = {part: rate for part, rate in RATES.items() if case.rates and part in case.train}
    # Gradients of key biases are rounding and nothing else; the epsilon keeps Adam from making full steps of them.
    return TrainingSettings(
        steps=MATRIX_STEPS,
        learning_rate=LEARNING_RATE,
        learning_rates=rates,
        adam_epsilon=1e-4,
        weight_decay=0.05,
        checked_updates=99,
        **values,
    )


def step_groups(policy: Policy, case: ZeroCase, step: int) -> list[list[RolloutGroup]]:
    """Complete groups of each update of a step, over all ranks; made from the weights the policy began with."""
    kinds = TEXT if case.text_steps and step in TEXT_STEPS else MEDIA
    return [
        make_groups(
            policy,
            [_sampled(policy, kind, LENGTHS[i], 100 * step + 10 * update + i) for i, kind in enumerate(of_update)],
        )
        for update, of_update in enumerate(kinds)
    ]


def _sampled(policy: Policy, kind: str, lengths: Sequence[int], seed: int) -> tuple[Any, list[Rollout]]:
    case = make_case(policy, kind, seed=seed)
    group = random_group(policy, case, list(lengths), seed=seed)
    # About what a random model gives each token of its vocabulary: ratios are near 1 and not all clipped.
    level = -torch.log(torch.tensor(float(policy.vocab_size)))
    return case.prompt, [Rollout(tokens, level.expand(len(tokens)).clone(), "stop") for tokens in group.responses]


def token_budget(groups: Sequence[RolloutGroup], chunked: bool) -> int:
    """Whole: the largest group alone fills a micro-batch. Chunked: no group of several long responses fits."""
    prompts = [group.prompt.num_tokens for group in groups]
    if chunked:
        return max(prompts) + max(max(len(r.token_ids) for r in group.rollouts) for group in groups) + 1
    return max(n + sum(len(r.token_ids) for r in g.rollouts) for n, g in zip(prompts, groups, strict=True))


def train(
    engine: Engine, case: ZeroCase, steps: Sequence[int], rank: int = 0, ranks: int = 1, whole: bool = False
) -> dict[str, float]:
    """Train these steps of the case on this rank's share; what the passes were, summed up.

    ``whole``: every update in a single pass.
    """
    # The bonus' gradient is another one, made by autograd within backward; a head that is no embedding has it alone.
    algorithm = AlgorithmSettings(clip_low=0.9, clip_high=5.0, entropy_coef=0.0 if case.tied else 0.02)
    done = dict.fromkeys(("micro_batches", "groups_chunked", "updates", *COMPARED), 0.0)
    for step in steps:
        for groups in step_groups(engine.policy, case, step):
            budget = 10**6 if whole else token_budget(groups, case.chunked)
            update = Update(groups[rank::ranks], LEARNING_RATE)
            metrics = update_policy(engine, None, update, UpdateSettings(algorithm, budget))
            done["updates"] += 1
            for name in ("micro_batches", "groups_chunked", *COMPARED):
                done[name] += metrics[name]
    return done


def run(case: ZeroCase, out: Path, own_cpu_adam: bool) -> None:
    """Train the case on the started ranks; OUT/<number>.safetensors: weights after all steps, what the passes were, and
    whether a run that was resumed has the same weights bit for bit."""
    from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

    folder = out.with_suffix("")
    file = folder / "deepspeed.json"
    ranks = RankLayout.here()
    if ranks.is_rank0:
        folder.mkdir(parents=True)
        file.write_text(json.dumps(case.deepspeed(own_cpu_adam)))
    barrier()
    settings = training_settings(case, engine="deepspeed", deepspeed_config=str(file))
    engine = DeepSpeedEngine(case_policy(case), settings, ranks)
    done = train(engine, case, range(case.stop_after), ranks.rank, ranks.world_size)
    engine.save_optimizer(folder)
    state = weights(engine)
    for name, value in train(engine, case, range(case.stop_after, case.steps), ranks.rank, ranks.world_size).items():
        done[name] += value
    after = weights(engine)
    resumed = DeepSpeedEngine(case_policy(case, state), settings, ranks)
    resumed.load_optimizer(folder)
    train(resumed, case, range(case.stop_after, case.steps), ranks.rank, ranks.world_size)
    again = weights(resumed)
    if ranks.is_rank0:
        same = all(torch.equal(after[name], again[name]) for name in after)
        metadata = {name: str(value) for name, value in done.items()} | {"resumed_equal": str(same)}
        save_file(after, out, metadata=metadata | {"description": engine.description})
    barrier()
    if ranks.is_rank0:
        shutil.rmtree(folder)


if __name__ == "__main__":  # OUT CASES [cpu-adam], a JSON list of fields of ``ZeroCase``
    out, cases, *options = sys.argv[1:]
    with connected_ranks():
        for number, values in enumerate(json.loads(Path(cases).read_text())):
            case = ZeroCase(**values | {"train": tuple(values["train"])})
            run(case, Path(out) / f"{number}.safetensors", "cpu-adam" in options)
