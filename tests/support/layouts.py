"""Ways to lay one training out over processes, all of which must train what one process trains; and what they train.

A further layout is a further entry in ``LAYOUTS``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from tests.support.groups import make_case, random_group, tiny_policy
from tests.support.processes import ROOT
from tests.support.training import make_groups
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.batching.cost import CostModel
from vlm_pg.distributed import SINGLE_RANK, RankLayout, max_over_ranks
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import PARTS, LoraSettings, Part
from vlm_pg.training.engines import Engine, TorchEngine
from vlm_pg.training.parallel import deal_update
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
from vlm_pg.types import Prompt, Rollout, RolloutGroup

STEPS, LEARNING_RATE = 5, 1e-3
RATES: dict[Part, float] = {"tower": 5e-4, "merger": 2e-3}
MERGER_AND_LANGUAGE: tuple[Part, ...] = ("merger", "language")
# Divides nothing: seven questions, five responses to each, over two or four ranks.
KINDS = ("video", "image", "text", "images", "image+video", "video", "text")
LENGTHS = (
    [5, 1, 9, 3, 7],
    [4, 4, 6, 2, 1],
    [3, 8, 2, 5, 5],
    [6, 2, 7, 1, 4],
    [2, 9, 3, 3, 6],
    [1, 5, 5, 8, 2],
    [7, 3, 4, 6, 1],
)


@dataclass(frozen=True)
class Layout:
    """``zero``: section ``zero_optimization`` of DeepSpeed's file; None for the torch engine.

    ``sequence``: processes that share the tokens of each data rank. ``lora``: an adapter trains, else the parts of the
    model that ``train`` names, tower and merger at learning rates of their own where it names not all. ``dealt``:
    rollouts change data ranks before an update.
    """

    name: str
    ranks: int
    zero: dict[str, Any] | None = None
    sequence: int = 1
    lora: bool = False
    family: str = "qwen2_5_vl"
    train: tuple[Part, ...] = PARTS
    quantize: bool = False  # beside an adapter
    settings: dict[str, Any] = field(default_factory=dict)  # of section ``training``
    dtype: str = "fp32"
    dealt: bool = False

    @property
    def trained(self) -> tuple[Part, ...]:
        """The parts that train; of the language model perhaps an adapter."""
        return ("language",) if self.lora else self.train

    @property
    def max_grad_norm(self) -> float:
        """Below gradient norms of all or some steps, so that clipping is compared too."""
        return 0.3 if self.trained == ("merger",) else 1.0


def shipped(name: str) -> dict[str, Any]:
    """The section of a file in configs/deepspeed, except that no weight is too small to be scattered."""
    zero = json.loads((ROOT / f"configs/deepspeed/{name}.json").read_text())["zero_optimization"]
    return zero | ({"stage3_param_persistence_threshold": 0} if zero["stage"] == 3 else {})


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("torch-1", 1),
        Layout("torch-2", 2),
        Layout("torch-4", 4),
        Layout("zero1-2", 2, shipped("zero1")),
        Layout("zero2-2", 2, shipped("zero2")),
        Layout("zero2-offload-2", 2, shipped("zero2_offload")),
        Layout("zero2-4", 4, shipped("zero2")),
        Layout("zero3-2", 2, shipped("zero3")),
        Layout("zero3-offload-2", 2, shipped("zero3_offload")),
        Layout("lora-torch-1", 1, lora=True),
        Layout("lora-torch-2", 2, lora=True),
        Layout("lora-zero2-2", 2, shipped("zero2"), lora=True),
        Layout("lora-zero3-2", 2, shipped("zero3"), lora=True),
        Layout("qlora-torch-2", 2, lora=True, quantize=True),
        Layout("qlora-zero2-2", 2, shipped("zero2"), lora=True, quantize=True),
        Layout("qlora-zero3-2", 2, shipped("zero3"), lora=True, quantize=True),
        Layout("qlora-sequence2", 2, sequence=2, lora=True, quantize=True),
        Layout("sequence2", 2, sequence=2),
        Layout("sequence4", 4, sequence=4),
        Layout("sequence2-data2", 4, sequence=2),
        Layout("sequence2-zero2-data2", 4, shipped("zero2"), sequence=2),
        Layout("sequence2-zero3", 2, shipped("zero3"), sequence=2),
        Layout("sequence2-lora-zero3", 2, shipped("zero3"), sequence=2, lora=True),
        *(
            Layout(f"sequence2-{family}", 2, sequence=2, family=family)
            for family in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
        ),
        Layout("sequence2-zero3-qwen3_5", 2, shipped("zero3"), sequence=2, family="qwen3_5"),
        Layout("dealt-torch-2", 2, dealt=True),
        Layout("dealt-torch-4", 4, dealt=True),
        *(
            Layout(f"dealt-{name.replace('_', '-')}-2", 2, shipped(name), dealt=True)
            for name in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
        ),
        Layout("dealt-zero2-4", 4, shipped("zero2"), dealt=True),
        Layout("dealt-sequence2-data2", 4, sequence=2, dealt=True),
        Layout("dealt-sequence2-zero3-data2", 4, shipped("zero3"), sequence=2, dealt=True),
        Layout("dealt-zero2-qwen3_vl", 2, shipped("zero2"), family="qwen3_vl", dealt=True),
        Layout("dealt-merger+language-zero3", 2, shipped("zero3"), train=MERGER_AND_LANGUAGE, dealt=True),
        Layout("merger+language-torch-1", 1, train=MERGER_AND_LANGUAGE),
        Layout("bf16-torch-1", 1, dtype="bf16"),
        Layout("bf16-torch-2", 2, dtype="bf16"),
        *(Layout(f"bf16-{name}-2", 2, shipped(name), dtype="bf16") for name in ("zero1", "zero2", "zero3")),
        Layout("bf16-lora-torch-1", 1, lora=True, dtype="bf16"),
        Layout("bf16-lora-zero2-2", 2, shipped("zero2"), lora=True, dtype="bf16"),
        Layout("bf16-lora-zero3-2", 2, shipped("zero3"), lora=True, dtype="bf16"),
        *(
            Layout(f"{'+'.join(train)}-{name}", 2, zero, sequence=sequence, family=family, train=train)
            for family, train in (("qwen2_5_vl", MERGER_AND_LANGUAGE), ("qwen3_vl", ("merger",)))
            for name, zero, sequence in (
                ("torch-2", None, 1),
                ("zero2-2", shipped("zero2"), 1),
                ("zero3-2", shipped("zero3"), 1),
                ("sequence2", None, 2),
                ("sequence2-zero3", shipped("zero3"), 2),
            )
        ),
    )
}


def layout_policy(layout: Layout) -> Policy:
    quantize: Literal["nf4"] | None = "nf4" if layout.quantize else None
    lora = LoraSettings(rank=4, alpha=8, quantize=quantize) if layout.lora else None
    return tiny_policy(train=layout.trained, family=layout.family, lora=lora)


def training_settings(layout: Layout, deepspeed_file: Path | None = None) -> TrainingSettings:
    """Gradients of key biases are rounding and nothing else; the epsilon keeps Adam from making full steps of them.

    Linear attention rounds more: with the same epsilon one process that cuts its batch otherwise is 1.4e-5 away.
    """
    epsilon = 1e-3 if layout.family == "qwen3_5" else 1e-4
    values: dict[str, Any] = {"adam_epsilon": epsilon, "weight_decay": 0.05, "max_grad_norm": layout.max_grad_norm}
    if deepspeed_file is not None:
        values |= {"engine": "deepspeed", "deepspeed_config": str(deepspeed_file)}
    if layout.train != PARTS:
        values["learning_rates"] = {part: rate for part, rate in RATES.items() if part in layout.train}
    return TrainingSettings(steps=STEPS, learning_rate=LEARNING_RATE, checked_updates=99, **(values | layout.settings))


def layout_engine(layout: Layout, folder: Path, ranks: RankLayout) -> Engine:
    """The layout's engine on this rank, around the policy all layouts begin with. Collective."""
    return engine_around(layout, folder, ranks, layout_policy(layout))


def engine_around(layout: Layout, folder: Path, ranks: RankLayout, policy: Policy) -> Engine:
    """The layout's engine on this rank. Collective."""
    if layout.zero is None:
        return TorchEngine(policy, training_settings(layout), ranks)
    from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(policy, deepspeed_settings(layout, folder, ranks), ranks)


def deepspeed_settings(layout: Layout, folder: Path, ranks: RankLayout) -> TrainingSettings:
    """With a file of this rank's own in ``folder``."""
    file = folder / f"{layout.name}-{ranks.rank}.json"
    # torch's AdamW in every layout: DeepSpeed's for CPUs is compiled first, and has a table of its own.
    file.write_text(json.dumps({"zero_optimization": layout.zero, "zero_force_ds_cpu_optimizer": False}))
    return training_settings(layout, file)


def step_groups(policy: Policy, step: int, questions: int = len(KINDS)) -> list[RolloutGroup]:
    """All complete groups of a step, of all ranks; they do not depend on weights."""
    turn = step % len(KINDS)
    kinds = (KINDS[turn:] + KINDS[:turn])[:questions]
    sampled = [_sampled(policy, kind, LENGTHS[index], 1000 * step + 10 * index) for index, kind in enumerate(kinds)]
    return make_groups(policy, sampled)


def _sampled(policy: Policy, kind: str, lengths: Sequence[int], seed: int) -> tuple[Prompt, list[Rollout]]:
    """Responses to a prompt of an odd number of tokens."""
    case = next(c for c in (make_case(policy, kind, seed + more) for more in range(10)) if c.prompt.num_tokens % 2)
    group = random_group(policy, case, list(lengths), seed=seed)
    # About what a random model gives each token of its vocabulary: ratios are near 1 and not all clipped.
    level = -torch.log(torch.tensor(float(policy.vocab_size)))
    return case.prompt, [Rollout(tokens, level.expand(len(tokens)).clone(), "stop") for tokens in group.responses]


def train_steps(
    engine: Engine,
    ranks: RankLayout = SINGLE_RANK,
    whole: bool = False,
    steps: Sequence[int] = range(STEPS),
    questions: int = len(KINDS),
    deal: bool = False,
) -> list[dict[str, float]]:
    """Metrics of each of the updates on this data rank's share. ``whole``: each in a single pass.

    ``deal``: after the share was dealt anew; ``moved`` says how many prompts with media came to this process by that,
    ``patches/`` what towers have had to do so far.
    """
    settings = AlgorithmSettings(clip_low=0.9, clip_high=5.0)
    found = []
    for step in steps:
        groups = step_groups(engine.policy, step, questions)
        # The largest group alone fills a micro-batch.
        budget = (
            10**6 if whole else max(g.prompt.num_tokens + sum(len(r.token_ids) for r in g.rollouts) for g in groups)
        )
        of_data_rank = groups[ranks.data_rank :: ranks.data_size]
        update = Update(of_data_rank, LEARNING_RATE)
        if deal:
            update = _dealt(engine, of_data_rank, step, budget)
        metrics = update_policy(engine, None, update, UpdateSettings(settings, budget))
        if deal:
            patches = float(engine.policy.vision.patches_run)
            run = {"most": patches, "least": -patches}
            metrics |= {"patches/" + name: abs(n) for name, n in max_over_ranks(run, engine.policy.device).items()}
        prompts = [group.prompt for group in update.groups]
        found.append(
            metrics | {"moved": float(sum(p.pixel_values is not None and p.pixel_values.is_meta for p in prompts))}
        )
    return found


def _dealt(engine: Engine, of_data_rank: Sequence[RolloutGroup], step: int, budget: int) -> Update:
    """Features are made before the deal, within it, or anew after it, in turn."""
    assert engine.parallel is not None
    made = None
    if step % 3 == 0:
        prompts = [group.prompt for group in of_data_rank]
        made = StepFeatures(engine.policy, prompts, engine.sequence, engine.everyone)
        pairs = zip(of_data_rank, made.prompts, strict=True)
        of_data_rank = [replace(group, prompt=prompt) for group, prompt in pairs]
    engine.parallel.prompts = {group.prompt.sample_id: group.prompt for group in of_data_rank}
    engine.parallel.costs = CostModel(token=1000, pair=1, logit=10)
    own = of_data_rank[engine.ranks.sequence_rank :: engine.ranks.sequence_size]
    share = deal_update(engine, Update(own, LEARNING_RATE, made), budget)
    share = share.encoded_anew(engine) if step % 3 == 2 else share
    return Update(share.groups, LEARNING_RATE, share.vision)


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    with engine.full_weights():
        return {name: p.detach().clone() for name, p in engine.policy.model.named_parameters()}


@dataclass(frozen=True)
class Trained:
    """Weights before and after all steps, and the metrics of each."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]


def trained_by_one_process(layout: Layout) -> Trained:
    """What the layout is compared with."""
    return _trained_by_one_process(layout.family, layout.train, layout.lora, layout.quantize)


@cache
def _trained_by_one_process(family: str, train: tuple[Part, ...], lora: bool, quantize: bool) -> Trained:
    layout = Layout("one", 1, family=family, train=train, lora=lora, quantize=quantize)
    engine = TorchEngine(layout_policy(layout), training_settings(layout))
    before = weights(engine)
    metrics = train_steps(engine, whole=True)
    return Trained(before, weights(engine), metrics)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of each weight: the largest difference of an element, relative to its largest element."""
    assert set(found) == set(expected)
    return {
        name: float((found[name].float() - weight.float()).abs().max() / weight.float().abs().max())
        for name, weight in expected.items()
    }
