"""Real updates of small models whose peak memory is measured and planned: python -m tests.support.plan_cases NAME.

Prints {"name": NAME, "rank": rank, "measured": bytes, "planned": bytes} of each rank; where rollouts are sampled, too,
of the update and of the whole step. Measured is what there is above
the level before the model was built, so weights, gradients and optimizer count, too: resident memory, of text in
bf16 tensors alone. There a CPU takes memory beside tensors, by its kind: oneDNN keeps a kernel for each shape, and
without bf16 instructions computes a product in fp32 copies. A GPU does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.support.live_bytes import LiveBytes
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.bench.memory import give_freed_memory_back, peak_above_baseline
from vlm_pg.distributed import SINGLE_RANK, RankLayout, gather_objects
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.recorded import ForwardBudget
from vlm_pg.models.settings import PARTS, ModelSettings
from vlm_pg.plan.memory import Plan, plan_memory, trained_weights
from vlm_pg.plan.setup import BYTES, Setup
from vlm_pg.plan.shape import shape_of
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.engines import Engine, TorchEngine
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import Update, UpdateSettings, update_policy
from vlm_pg.types import Prompt, RewardBreakdown, Rollout, RolloutGroup, Sample

TEXT = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 704, "vocab_size": 4096}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}}
WIDE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 1}
WIDE |= {"intermediate_size": 1536, "vocab_size": 32768}
VISION = {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 320, "fullatt_block_indexes": [3]}


@dataclass(frozen=True)
class Case:
    """One group of ``responses`` behind a prompt of about ``prefix`` tokens; with ``frames`` of 8 x 8 visual tokens.

    ``recorded``: so many of two such groups, which are sampled, start from the forward of sampling.
    """

    prefix: int = 4096
    frames: int = 0
    responses: Sequence[int] = (64, 64, 64, 64)
    budget: int = 100_000
    model: dict[str, Any] = field(default_factory=dict)
    zero: str | None = None
    family: str = "qwen2_5_vl"
    text: dict[str, Any] = field(default_factory=dict)
    recorded: int | None = None

    @property
    def settings(self) -> ModelSettings:
        return ModelSettings(path="tiny", **self.model)

    @property
    def by_tensors(self) -> bool:
        return self.settings.dtype == "bf16"


CASES = {
    "short": Case(prefix=2048),
    "short-bf16-checkpointing": Case(prefix=2048, model={"dtype": "bf16", "gradient_checkpointing": True}),
    "fp32-checkpointing": Case(prefix=8192, model={"gradient_checkpointing": True}),
    "bf16-checkpointing": Case(prefix=8192, model={"dtype": "bf16", "gradient_checkpointing": True}),
    "recorded": Case(prefix=8192, recorded=2, model={"dtype": "bf16"}),
    "recorded-none": Case(recorded=0, model={"dtype": "bf16", "gradient_checkpointing": True}),
    "recorded-half": Case(recorded=1, model={"dtype": "bf16", "gradient_checkpointing": True}),
    "recorded-wide": Case(
        prefix=2048, text=WIDE, responses=(256,) * 4, recorded=2, model={"dtype": "bf16", "logits_chunk_mb": 8}
    ),
    "recorded-chunks": Case(
        responses=(512,) * 8, budget=4096 + 1024, recorded=2, model={"dtype": "bf16", "gradient_checkpointing": True}
    ),
    "chunks": Case(prefix=4096, responses=(512,) * 8, budget=4096 + 1024),
    "chunks-checkpointing": Case(
        prefix=8192, responses=(512,) * 8, budget=8192 + 1024, model={"gradient_checkpointing": True}
    ),
    "frozen-tower": Case(frames=64),
    "trained-tower-bf16-checkpointing": Case(
        frames=64, model={"train": PARTS, "dtype": "bf16", "gradient_checkpointing": True}
    ),
    "merger": Case(frames=64, model={"train": ("merger", "language")}),
    "frozen-language-checkpointing": Case(
        frames=64, model={"train": ("tower", "merger"), "gradient_checkpointing": True}
    ),
    "lora-bf16-checkpointing": Case(
        prefix=8192, model={"lora": {"rank": 8}, "dtype": "bf16", "gradient_checkpointing": True}
    ),
    "qlora": Case(text=WIDE, model={"lora": {"rank": 8, "quantize": "nf4"}}),
    "zero2": Case(zero="configs/deepspeed/zero2.json"),
    "zero3-checkpointing": Case(zero="configs/deepspeed/zero3.json", model={"gradient_checkpointing": True}),
    "qwen3": Case(family="qwen3_vl"),
    "wide-checkpointing": Case(text=WIDE, responses=(128,) * 4, model={"gradient_checkpointing": True}),
    "wide-bf16-small-logits": Case(
        prefix=2048, text=WIDE, responses=(256,) * 4, model={"dtype": "bf16", "logits_chunk_mb": 8}
    ),
}


def policy_of(case: Case) -> Policy:
    text = TEXT | case.text
    vision = dict(VISION)
    if case.family == "qwen3_vl":
        text |= {
            "head_dim": 64,
            "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [12, 10, 10], "mrope_interleaved": True},
        }
        vision = {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 320}
    model = tiny_model(case.family, text=text, vision=vision).to(DTYPES[case.settings.dtype])
    return make_policy(model, tiny_processor(case.family), case.settings)


def group_of(policy: Policy, case: Case, seed: int = 0) -> RolloutGroup:
    generator = torch.Generator().manual_seed(seed)
    prompt = _video(policy, case.frames, seed) if case.frames else _text(case.prefix, generator)
    responses = [torch.randint(20, 300, (length,), generator=generator) for length in case.responses]
    rollouts = tuple(Rollout(ids, torch.full((len(ids),), -5.0), "stop") for ids in responses)
    sample = Sample("0", "?", (), (), "A", "multiple_choice", "test", "test")
    rewards = tuple(RewardBreakdown(float(i), {}) for i in range(len(rollouts)))
    return RolloutGroup(sample, prompt, rollouts, 0, rewards, tuple(0.5 - i % 2 for i in range(len(rollouts))))


def _text(tokens: int, generator: torch.Generator) -> Prompt:
    ids = torch.randint(20, 300, (tokens,), generator=generator)
    return Prompt("text", ids, torch.zeros_like(ids), torch.arange(tokens).expand(3, -1))


def _video(policy: Policy, frames: int, seed: int) -> Prompt:
    import numpy as np

    side = 8 * policy.pixel_factor
    video = np.random.default_rng(seed).integers(0, 256, (frames, 3, side, side), dtype=np.uint8)
    content = [{"type": "video"}, {"type": "text", "text": "Which colour is shown first?"}]
    text = policy.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    metadata = [{"fps": 2.0, "frames_indices": list(range(frames)), "total_num_frames": frames}]
    inputs = policy.processor(
        text=[text],
        videos=[video],
        video_metadata=metadata,
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    return prompt_from_processor(inputs, policy.positions, "video")


def engine_of(policy: Policy, case: Case, ranks: RankLayout) -> Engine:
    if case.zero is None:
        return TorchEngine(policy, TrainingSettings(steps=1))
    from vlm_pg.training.deepspeed_engine import DeepSpeedEngine

    settings = TrainingSettings(steps=1, engine="deepspeed", deepspeed_config=case.zero, checked_updates=0)
    return DeepSpeedEngine(policy, settings, ranks)


def train(case: Case, updates: Sequence[Sequence[RolloutGroup]], ranks: RankLayout = SINGLE_RANK) -> None:
    """In the first update the optimizer has no states yet, so a peak needs a second one."""
    policy = policy_of(case)
    engine = engine_of(policy, case, ranks)
    settings = UpdateSettings(AlgorithmSettings(), case.budget)
    for groups in updates:
        update_policy(engine, None, Update(groups, 1e-4), settings)


def live_peak(case: Case) -> int:
    """Most bytes of tensors at a time, the same on every processor.

    Of two micro-batches: beside the second one are the gradients of the first, which a plan counts. Their videos
    differ, so a tower that trains keeps a graph for each; of one video in both there is one graph.
    """
    policy, short = policy_of(case), shortened(case)
    with LiveBytes() as live:
        groups = [group_of(policy, case, seed) for seed in (0, 1)]
        budget = one_at_a_time(case, groups[0])
        train(replace(case, budget=budget), [[group_of(policy, short)], groups])
    return live.peak


def recorded_peaks(case: Case) -> list[int]:
    """As ``live_peak``, of the update alone and of the whole step, which samples its groups one after the other."""
    budget = one_at_a_time(case, group_of(policy_of(case), case))
    settings = UpdateSettings(AlgorithmSettings(), budget)
    with LiveBytes() as live:
        policy = policy_of(case)
        engine = engine_of(policy, case, SINGLE_RANK)
        update_policy(engine, None, Update([group_of(policy, shortened(case))], 1e-4), settings)
        live.peak = live.now
        groups = sampled(policy, case)
        of_rollouts, live.peak = live.peak, live.now
        update_policy(engine, None, Update(groups, 1e-4), settings)
    return [live.peak, max(of_rollouts, live.peak)]


def sampled(policy: Policy, case: Case) -> list[RolloutGroup]:
    """Two groups, so many of which are recorded."""
    length, count = case.responses[0], len(case.responses)
    lengths = {"max_new_tokens": length, "min_new_tokens": length}
    settings = RolloutSettings(num_generations=count, max_batch_rollouts=count, **lengths)
    limit = keep_forward(policy, case)
    groups = [group_of(policy, case, seed) for seed in (0, 1)]
    engine = RolloutEngine(policy, settings, 0, forwards=[ForwardBudget(limit, policy.recorded_bytes())])
    rollouts = engine.generate([group.prompt for group in groups], 1)
    assert sum(of_group[0].forward is not None for of_group in rollouts) == case.recorded
    return [
        replace(group, rollouts=tuple(of_group), policy_version=policy.weights_version)
        for group, of_group in zip(groups, rollouts, strict=True)
    ]


def keep_forward(policy: Policy, case: Case) -> int:
    """Bytes with room for ``recorded`` groups, as they are booked."""
    return (case.recorded or 0) * policy.recorded_bytes() * (case.prefix + sum(case.responses))


def one_at_a_time(case: Case, group: RolloutGroup) -> int:
    """A budget that holds no two groups."""
    return min(case.budget, group.prompt.num_tokens + sum(case.responses) - len(case.responses))


def shortened(case: Case) -> Case:
    return replace(case, prefix=64, frames=0, responses=(8, 8), budget=1000)


def measured(case: Case, ranks: RankLayout = SINGLE_RANK) -> list[int]:
    torch.set_num_threads(1)
    if case.recorded is not None:
        return recorded_peaks(case)
    if case.by_tensors:
        return [live_peak(case)]
    small = shortened(case)
    give_freed_memory_back()
    some = policy_of(small)
    # What is loaded at first use is no part of it; nor are pixels that lie in the host's memory.
    train(small, [[group_of(some, small)]] * 2, ranks)
    group = group_of(some, case)
    _, peak = peak_above_baseline(lambda: train(case, [[group]] * 2, ranks))
    return [peak.num_bytes]


def planned(case: Case) -> Plan:
    """Of the same case, from dimensions alone."""
    some = policy_of(case)
    shape, group = shape_of(some.model.config, case.settings), group_of(some, case)
    pixels, stage = group.prompt.pixel_values, 0 if case.zero is None else int(case.zero[-6])
    setup = Setup(
        element=BYTES[case.settings.dtype],
        checkpointing=case.settings.gradient_checkpointing,
        train=case.settings.train,
        lora=case.settings.lora is not None,
        quantize=case.settings.lora is not None and case.settings.lora.quantize is not None,
        stage=stage,
        ranks=2 if stage else 1,
        prefix=group.prompt.num_tokens,
        patches=0 if pixels is None else len(pixels),
        response=case.responses[0] - 1,
        generations=len(case.responses),
        budget=one_at_a_time(case, group) if case.by_tensors else case.budget,
        logits_bytes=case.settings.least_logits_bytes,
        prompts=2 if case.by_tensors else 1,
        room_for_forwards=float(keep_forward(some, case)),
    )
    # DeepSpeed's buckets are larger than all gradients here: what is never written to is not resident.
    return plan_memory(shape, replace(setup, bucket=trained_weights(shape, setup) if stage else 0))


def main(name: str) -> None:
    case, ranks = CASES[name], SINGLE_RANK
    if case.zero is not None:
        from vlm_pg.training.deepspeed_engine import connect

        connect()
        ranks = RankLayout.here()
    of_ranks = gather_objects(measured(case, ranks))
    if ranks.is_rank0:
        plan = planned(case)
        sizes = [plan.peak] if case.recorded is None else [sum(plan.phases["update"].values()), plan.peak]
        for rank, peaks in enumerate(of_ranks):
            for peak, size in zip(peaks, sizes, strict=True):
                print(json.dumps({"name": name, "rank": rank, "measured": peak, "planned": size}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
