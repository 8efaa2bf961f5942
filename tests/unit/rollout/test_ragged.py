"""Rollouts as rows of one ragged batch equal those of cohorts, whatever enters, leaves or grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.numerics.test_rollout import assert_same, count_calls, engine, questions, ragged_stops
from tests.support.fake_cuda import Elsewhere
from tests.support.groups import make_case, tiny_policy
from tests.support.recorded import RecordedMemory
from tests.support.table_kernel import TableKernel
from tests.support.tiny import FAMILY_NAMES
from tests.unit.rollout.test_prefill import prefilled
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.models.liger import Liger
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import graphs, ragged
from vlm_pg.rollout.admission import TokenCosts
from vlm_pg.rollout.decoding import Cohort, CohortDecoder, Decoder
from vlm_pg.rollout.fused import choice
from vlm_pg.rollout.graphs import LEAST_REPLAYS, GraphUse, decoding_line, experts_wait
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.linear_step import DeltaRule, gated_delta_step_
from vlm_pg.rollout.ragged import OwnRows, RaggedDecoder, decoder_for, room_for, row_bucket
from vlm_pg.rollout.sampling import Choice
from vlm_pg.rollout.settings import RolloutSettings

VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}
BLOCK = 8
SETTINGS = RolloutSettings(max_new_tokens=20)
# Step -> questions of the rollouts that enter, or (cohort, rows of it that stay).
SCRIPT: dict[int, list[tuple[str, Any]]] = {
    0: [("admit", (0, 0, 1))],
    2: [("admit", (2, 1, 0, 2) * 3 + (1,))],
    3: [("admit", (1,)), ("stay", (1, (0, 3, 4, 5, 6, 7, 8, 9, 11)))],
    5: [("stay", (0, (0, 2)))],
    10: [("stay", (1, (1, 8)))],
    12: [("stay", (0, ()))],
    13: [("admit", (0, 2))],
}
NUM_STEPS = 20  # of own tokens, the room for which grows once


def test_shapes_are_few() -> None:
    """Rows leave little idle; room grows fourfold, up to the longest response."""
    sizes = [row_bucket(n) for n in range(300)]
    assert all(rows >= n for n, rows in enumerate(sizes))
    assert sorted(set(sizes)) == [0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    given = [(1, 150), (1, 5000), (512, 5000), (513, 5000), (2049, 5000), (5000, 5000)]
    assert [room_for(tokens, longest) for tokens, longest in given] == [192, 512, 512, 2048, 5056, 5056]


def scripted(policy: Policy, decoder_type: type) -> list[torch.Tensor]:
    """Hidden states of every step; tokens depend on cohort, first row and step, not on the decoder."""
    prompts = [make_case(policy, seed=i, **kind).prompt for i, kind in enumerate((VIDEO, {"kind": "text"}, VIDEO))]
    waiting, store, _ = prefilled(policy, prompts)
    assert max(map(len, waiting.paths)) == 2
    decoder: Decoder = decoder_type(policy, store, SETTINGS)
    cohorts: list[Cohort] = []
    origins: dict[Cohort, list[int]] = {}

    def admit(numbers: Sequence[int]) -> None:
        count = len(numbers)
        positions = torch.tensor([prompts[q].next_position for q in numbers])
        uniforms = torch.zeros(count, SETTINGS.max_new_tokens)
        paths = [waiting.paths[q] for q in numbers]
        cohorts.append(Cohort([(q, 0) for q in numbers], paths, torch.zeros(count, 1), positions, uniforms, None))
        origins[cohorts[-1]] = [100 * len(origins) + row for row in range(count)]
        decoder.admit(cohorts[-1])

    def sample(step: int, cohort: Cohort) -> None:
        tokens = torch.tensor([100 + (origin * 7 + step * 13) % 200 for origin in origins[cohort]])
        cohort.record(Choice(tokens, *torch.zeros(3, len(tokens))), slice(None), tokens.tolist())

    def stay(number: int, rows: Sequence[int]) -> None:
        cohort = cohorts[number]
        for row in set(cohort.running_rows()) - set(rows):
            cohort.finish(row, "stop")
        if rows:
            cohort.evict_finished()
        decoder.retain(cohort, rows)
        origins[cohort] = [origins[cohort][row] for row in rows]
        if not rows:
            cohorts.remove(cohort)

    results = []
    for step in range(NUM_STEPS):
        actions = SCRIPT.get(step, [])
        for _, numbers in (action for action in actions if action[0] == "admit"):
            admit(numbers)
        for cohort in cohorts:
            sample(step, cohort)
        for _, staying in (action for action in actions if action[0] == "stay"):
            stay(*staying)
        tokens = torch.cat([cohort.last_tokens for cohort in cohorts])
        results.append(decoder.step(tokens, torch.cat([cohort.positions for cohort in cohorts])))
        for cohort, part in zip(cohorts, results[-1].split([cohort.num_rows for cohort in cohorts]), strict=True):
            cohort.hidden = part
    return results


FEW = ("qwen2_5_vl", "qwen3_5")
OTHERS = [pytest.param(name, marks=pytest.mark.matrix) for name in FAMILY_NAMES if name not in FEW]


@pytest.mark.parametrize(
    "family, recorded",
    [
        *(
            pytest.param(name, True, marks=() if name in (*FEW, "qwen3_vl_moe") else pytest.mark.matrix)
            for name in FAMILY_NAMES
        ),
        *(pytest.param(name, False, marks=() if name in FEW else pytest.mark.matrix) for name in FAMILY_NAMES),
    ],
)
@torch.no_grad()
def test_hidden_states_are_those_of_cohorts(family: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    monkeypatch.setattr(ragged, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(ragged, "FIRST_ROOM", BLOCK)
    monkeypatch.setattr(ragged, "MANY_ROWS", 8)
    if recorded:
        record_steps(policy, monkeypatch)
        monkeypatch.setattr(graphs, "LEAST_REPLAYS", 1)
    moves = count_calls(monkeypatch, OwnRows, "move")
    expected, got = scripted(policy, CohortDecoder), scripted(policy, RaggedDecoder)
    for step, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-5, f"step {step}"
    # Rows for 3, 16 and 17 rollouts, once more room, and fewer rows when few are left: all other leaving is an idle
    # row, and all other entering takes one.
    assert len(moves) == 5


def record_steps(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with recorded operators for a graph, and lengths that stand in tensors."""
    monkeypatch.setattr(policy, "kernel", TableKernel())
    monkeypatch.setattr(ragged, "GraphMemory", RecordedMemory)
    monkeypatch.setattr(ragged, "reusable_bytes", lambda _: 2**30)
    monkeypatch.setattr(ragged.GraphUse, "of", lambda *_: GraphUse())


@pytest.mark.parametrize("family", [*FEW, *OTHERS])
def test_the_engine_samples_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family)
    ragged_stops(policy)
    prompts = questions(policy)
    settings = {"num_generations": 3, "max_batch_rollouts": 7, "prefill_tokens": 64}
    expected = engine(policy, **settings).generate(prompts, step=4)
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    own_calls = count_calls(monkeypatch, CpuFlashKernel, "ragged_forward")
    together = engine(policy, **settings)
    assert_same(together.generate(prompts, step=4), expected)
    assert together.stats.cohorts > 3
    layers = policy.family.layer_kinds(policy.model.config).count("full_attention")
    assert len(own_calls) == together.stats.decode_steps * layers, "one call a layer"
    linear_rule = "torch" if policy.family.linear_attention else None
    steps = together.stats.decode_steps
    assert together.stats.graphs == GraphUse("the model is on cpu", linear_rule=linear_rule, eager_steps=steps)


def test_steps_are_recorded_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    policy.model.generation_config.eos_token_id = [0]
    prompts = questions(policy)[:2]
    long = {"num_generations": 2, "max_new_tokens": 90}
    expected = engine(policy, **long).generate(prompts, step=0)
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    record_steps(policy, monkeypatch)
    recorded = engine(policy, **long)
    assert_same(recorded.generate(prompts, step=0), expected)
    assert recorded.stats.graphs == GraphUse(None, captures=1, replays=88)
    short = engine(policy, num_generations=2, max_new_tokens=LEAST_REPLAYS + 1)
    short.generate(prompts, step=0)
    assert short.stats.graphs == GraphUse(None, eager_steps=LEAST_REPLAYS)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_later_calls_replay_what_earlier_ones_recorded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other prompts, other weights in the same place, rollouts that end early: nothing is recorded again."""
    policy = tiny_policy(family=family)
    ragged_stops(policy)
    prompts = questions(policy)
    calls = [prompts[:2], prompts[2:4], prompts[1:3]]
    settings = {"num_generations": 3, "max_new_tokens": 40}

    def generated(change: bool) -> list[Any]:
        sampler = engine(policy, **settings)
        found = []
        for step, of_call in enumerate(calls):
            found.append(sampler.generate(of_call, step=step))
            captures.append(sampler.stats.graphs.captures)
            assert sampler.stats.graphs.eager_steps == 0 or not change
            with torch.no_grad():
                policy.language_model.layers[0].mlp.down_proj.weight.mul_(1.5 if step % 2 == 0 else 1 / 1.5)
        return found

    captures: list[int] = []
    before = policy.language_model.layers[0].mlp.down_proj.weight.clone()
    expected = generated(False)
    with torch.no_grad():
        policy.language_model.layers[0].mlp.down_proj.weight.copy_(before)
    captures.clear()
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    monkeypatch.setattr(graphs, "LEAST_REPLAYS", 0)
    record_steps(policy, monkeypatch)
    for ours, others in zip(generated(True), expected, strict=True):
        assert_same(ours, others)
    assert captures[1:] == [0, 0], captures


def test_a_gpu_is_warmed_up_while_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, begun = tiny_policy(), []
    sampler = engine(policy, num_generations=3, min_new_tokens=5)
    sampler.warm_up(lambda: begun.append(0))
    assert not begun, "on a CPU there is nothing to load"
    record_steps(policy, monkeypatch)
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    steps = count_calls(monkeypatch, RaggedDecoder, "step")
    sampler.warm_up(lambda: begun.append(len(steps)))
    assert begun == [0] and len(steps) == 1
    assert sampler.stats.new_tokens == 0, "warm-up tokens are not counted"


def test_buffers_are_reused_while_they_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    prompts = questions(policy)[:2]
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    record_steps(policy, monkeypatch)
    free = engine(policy, num_generations=2).budget()
    monkeypatch.setattr("vlm_pg.rollout.admission.free_bytes", lambda _: 10**6)
    sampler = engine(policy, num_generations=2)
    expected = sampler.generate(prompts, step=0)
    decoder = sampler._decoder
    assert decoder is not None and decoder.is_current() and free > 0
    assert sampler.budget() == int(0.6 * (10**6 + decoder.nbytes)), "its buffers are not free, and are reused"
    # Weights that lie elsewhere: a recorded step would read the old ones.
    weight = policy.language_model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()
    assert not decoder.is_current()
    assert_same(sampler.generate(prompts, step=0), expected)
    assert sampler._decoder not in (None, decoder)
    monkeypatch.setattr(ragged, "reusable_bytes", lambda _: 10)
    assert_same(sampler.generate(prompts, step=0), expected)
    assert sampler._decoder is None, "more than may stay through an update"


@pytest.mark.parametrize("family, dtype", [("qwen2_5_vl", torch.float32), ("qwen3_5", torch.bfloat16)])
def test_own_rows_have_the_booked_size(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family=family, dtype=dtype)
    policy.model.generation_config.eos_token_id = [0]
    made: list[RaggedDecoder] = []
    monkeypatch.setattr(
        "vlm_pg.rollout.engine.decoder_for", lambda *args: made.append(RaggedDecoder(*args)) or made[-1]
    )
    prompt = make_case(policy, "text", seed=0).prompt
    sampler = engine(policy, num_generations=3, max_new_tokens=150)
    sampler.generate([prompt], step=0)
    decoder, costs = made[0], TokenCosts.of(policy)
    assert decoder.rows_for(3) == 4 and decoder._own.capacity == 192
    assert sampler.stats.peak_bytes == decoder.nbytes + costs.per_state
    assert decoder.store.nbytes == prompt.num_tokens * costs.per_token


def test_why_steps_are_not_recorded() -> None:
    def reason(policy: Any, **settings: Any) -> str | None:
        return GraphUse.of(policy, RolloutSettings(**settings)).off_because

    on_cuda: Any = Elsewhere(tiny_policy(), "cuda")
    assert reason(on_cuda) is None
    assert "queries in every layer" in str(GraphUse.of(on_cuda, RolloutSettings(), divided=True).off_because)
    assert reason(on_cuda, cuda_graphs=False) == "rollout.cuda_graphs is false"
    assert reason(tiny_policy()) == "the model is on cpu"
    assert reason(Elsewhere(tiny_policy(family="qwen3_5"), "cuda")) is None
    on_cuda.lockstep = object()
    assert reason(on_cuda) == "ranks run in lockstep through scattered weights"
    scattered: Any = Elsewhere(tiny_policy(), "cuda")
    next(scattered.model.parameters()).ds_id = 0
    assert "ZeRO-3" in str(reason(scattered))


def test_a_run_says_how_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "rule_of", lambda _: DeltaRule("torch (Triton kernel: none)", gated_delta_step_))
    monkeypatch.setattr(choice, "judged", lambda *_: {})
    plain, linear = (Elsewhere(tiny_policy(family=family), "cuda") for family in ("qwen2_5_vl", "qwen3_5"))
    lines = [
        decoding_line(policy, RolloutSettings(cuda_graphs=on, fused_kernels=not linear))  # type: ignore[arg-type]
        for policy, on, linear in ((plain, True, False), (plain, False, False), (linear, True, True))
    ]
    small = "; its small operations:"
    assert lines == [
        f"decoding: steps are replayed from CUDA graphs{small} triton",
        f"decoding: no CUDA graphs: rollout.cuda_graphs is false{small} triton",
        f"decoding: steps are replayed from CUDA graphs{small} torch (rollout.fused_kernels is false); "
        "states of linear-attention layers: torch (Triton kernel: none)",
    ]


@pytest.mark.parametrize(
    "dtype, capability, implementation, expected",
    [
        (torch.bfloat16, (9, 0), "grouped_mm", None),
        (torch.bfloat16, (10, 3), "grouped_mm", None),
        (torch.bfloat16, (12, 0), "grouped_mm", "offsets to the host in bfloat16 at compute capability 12.0"),
        (torch.float32, (9, 0), "grouped_mm", "offsets to the host in float32 at compute capability 9.0"),
        (torch.float32, (8, 0), "batched_mm", None),
        (torch.bfloat16, (9, 0), "eager", "implementation 'eager' of transformers may ask"),
    ],
)
def test_mixtures_are_recorded_where_their_products_do_not_wait(
    dtype: torch.dtype,
    capability: tuple[int, int],
    implementation: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny_policy(family="qwen3_5_moe", dtype=dtype)
    policy.model.set_experts_implementation(implementation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    off_because = GraphUse.of(Elsewhere(policy, "cuda"), RolloutSettings()).off_because  # type: ignore[arg-type]
    assert off_because is None if expected is None else expected in str(off_because)


def test_unknown_experts_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family="qwen3_vl_moe", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert experts_wait(policy) is None
    policy.model.vlm_pg_liger = Liger(("rms_norm", "experts"))
    assert "liger-kernel's experts" in str(experts_wait(policy))
    policy.model.vlm_pg_liger = Liger(("rms_norm", "swiglu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in str(experts_wait(policy))


def test_the_decoder_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RaggedDecoder", "CohortDecoder"):
        monkeypatch.setattr(ragged, name, lambda *_, name=name: name)
    for family in ("qwen2_5_vl", "qwen3_5"):
        policy: Any = tiny_policy(family=family)
        on_cuda: Any = Elsewhere(policy, "cuda")
        found = [decoder_for(one, PrefixStore(), RolloutSettings()) for one in (policy, on_cuda)]
        assert found == ["CohortDecoder", "RaggedDecoder"]
