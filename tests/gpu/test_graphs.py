"""On a real GPU: rows of different lengths, and decode steps replayed from CUDA graphs."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from tests.support.groups import KINDS, make_case
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.attention.kernels import KERNELS, available, select_kernel
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.models.loading import make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import FAMILIES
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.graphs import GraphMemory, experts_wait
from vlm_pg.rollout.linear_step import delta_rule_for, gated_delta_step_
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import ResponseGroup

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (28, 4)])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "oracle"])
def test_rows_of_different_lengths(name: str, dtype: torch.dtype, bound: float, heads: int, kv_heads: int) -> None:
    if reason := available(CUDA, dtype)[name]:
        pytest.skip(reason)
    kernel = select_kernel(CUDA, dtype, name)
    lengths = torch.tensor([1, 700, 64, 65, 1024, 3, 129, 1], dtype=torch.int32, device=CUDA)
    q = torch.randn(8, heads, 128, device=CUDA, dtype=dtype)
    k, v = (torch.randn(8, 1024, kv_heads, 128, device=CUDA, dtype=dtype) for _ in range(2))
    behind = torch.arange(1024, device=CUDA) >= lengths[:, None]
    k[behind], v[behind] = 20.0, 1000.0  # would be seen
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = kernel.ragged_forward(q, k, v, lengths, 128**-0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = OracleKernel().ragged_forward(q.double(), k.double(), v.double(), lengths, 128**-0.5)
    for part, a, b in zip(("out", "log-sum-exp"), got, expected, strict=True):
        assert a.shape == b.shape
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < bound, f"{name} {dtype} {part}: {error:.1e}"


def long_answers(family: str, dtype: torch.dtype, lora: LoraSettings | None = None) -> Policy:
    settings = ModelSettings(path="tiny", lora=lora)
    policy = make_policy(tiny_model(family).to(CUDA, dtype), tiny_processor(family), settings)
    # Some responses stop on the way, so that rows fall idle, close up and make room.
    policy.model.generation_config.eos_token_id = list(range(0, policy.vocab_size, 80))
    return policy


def skip_where_experts_wait(policy: Policy) -> None:
    if policy.family.moe and (reason := experts_wait(policy)):
        pytest.skip(reason)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replayed_steps_sample_what_eager_ones_do(family: str, dtype: torch.dtype) -> None:
    policy = long_answers(family, dtype)
    skip_where_experts_wait(policy)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    settings = {"num_generations": 4, "max_new_tokens": 200, "max_batch_rollouts": 12}
    results = {}
    for graphs in (True, False):
        engine = RolloutEngine(policy, RolloutSettings(cuda_graphs=graphs, **settings), seed=0)
        results[graphs] = engine.generate(prompts, step=1)
        use = engine.stats.graphs
        if graphs:
            assert use.off_because is None and 1 <= use.captures <= 4 and use.replays > 10 * use.captures
            again = engine.generate(prompts, step=1)
            assert engine.stats.graphs.captures == 0, "what the first call recorded serves the second"
            for ours, others in zip(again, results[graphs], strict=True):
                assert [one.token_ids.tolist() for one in ours] == [one.token_ids.tolist() for one in others]
            assert use.linear_rule == ("triton" if policy.family.linear_attention else None)
        else:
            assert (use.off_because, use.captures) == ("rollout.cuda_graphs is false", 0)
    for replayed, eager in zip(results[True], results[False], strict=True):
        for one, other in zip(replayed, eager, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.rollout_logprobs - other.rollout_logprobs).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_kernels_are_taken_and_sample_what_modules_do(family: str, dtype: torch.dtype) -> None:
    policy = long_answers(family, dtype)
    skip_where_experts_wait(policy)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    results, used = {}, {}
    for fused in (True, False):
        # Greedy. In half precision a rounding may lead elsewhere, so only what both begin with is compared.
        settings = RolloutSettings(num_generations=2, max_new_tokens=60, temperature=0, fused_kernels=fused)
        engine = RolloutEngine(policy, settings, seed=0)
        results[fused] = engine.generate(prompts, step=1)
        used[fused] = engine.stats.graphs.fused
    assert used == {True: "triton", False: "torch (rollout.fused_kernels is false)"}
    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    # Rounding flips a route now and then (tests/unit/rollout/test_fused.py): what follows differs by more.
    worst = torch.median if policy.family.moe and dtype != torch.float32 else torch.max
    for fused_ones, others in zip(results[True], results[False], strict=True):
        for one, other in zip(fused_ones, others, strict=True):
            same = [a == b for a, b in zip(one.token_ids.tolist(), other.token_ids.tolist(), strict=False)]
            count = same.index(False) if False in same else len(same)
            assert count == len(same) if dtype == torch.float32 else count >= 1
            assert worst((one.rollout_logprobs[:count] - other.rollout_logprobs[:count]).abs()) < bound
            assert worst((one.entropies[:count] - other.entropies[:count]).abs()) < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_and_training_agree(family: str) -> None:
    policy = long_answers(family, torch.float32)
    skip_where_experts_wait(policy)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, max_new_tokens=150), seed=0)
    sampled = engine.generate(prompts, step=1)
    assert engine.stats.graphs.replays > 50
    groups = [ResponseGroup(p, tuple(r.token_ids for r in rs)) for p, rs in zip(prompts, sampled, strict=True)]
    with torch.no_grad():
        scored = policy.logprobs(groups)
    for rollouts, logprobs in zip(sampled, scored, strict=True):
        for rollout, expected in zip(rollouts, logprobs, strict=True):
            assert (rollout.rollout_logprobs - expected.cpu()).abs().max() < 1e-4


@pytest.mark.parametrize("key_size, value_size", [(128, 128), (16, 16), (64, 96)])
def test_the_triton_kernel_is_taken_and_does_not_wait(key_size: int, value_size: int) -> None:
    rule = delta_rule_for(CUDA, key_size, value_size)
    assert rule.name == "triton"
    rows, heads = 48, 32
    query, key, value = (
        torch.randn(rows, heads, size, device=CUDA, dtype=torch.bfloat16) for size in (key_size, key_size, value_size)
    )
    log_decay, beta = -torch.rand(rows, heads, device=CUDA), torch.rand(rows, heads, device=CUDA)
    states = [torch.randn(rows, heads, key_size, value_size, device=CUDA)]
    states.append(states[0].clone())
    expected = gated_delta_step_(states[1], query, key, value, log_decay, beta)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = rule.step_(states[0], query, key, value, log_decay, beta)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (states[0] - states[1]).abs().max() < 1e-5 * states[1].abs().max()


def test_the_memory_of_one_recorded_step_serves_the_next() -> None:
    memory, x = GraphMemory(CUDA), torch.ones(2**20, device=CUDA)
    out = torch.empty_like(x)

    def work() -> None:
        out.copy_((x + 1) * 2)

    replays = [memory.capture(work)]
    reserved = torch.cuda.memory_reserved()
    for _ in range(5):
        replays.append(memory.capture(work))
    assert torch.cuda.memory_reserved() <= reserved
    x.fill_(3)
    replays[-1]()
    assert out.unique().tolist() == [8.0]


def test_what_cannot_be_recorded_says_so() -> None:
    x = torch.ones(1, device=CUDA)
    with pytest.raises(RuntimeError, match=r"could not be recorded as a CUDA graph: .* Set rollout\.cuda_graphs=false"):
        GraphMemory(CUDA).capture(lambda: x.item())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_an_adapter_is_merged_for_a_generation(family: str, quantize: Literal["nf4"] | None) -> None:
    """In fp32 both sample the same; afterwards every weight is what it was, packed or not."""
    if quantize:
        pytest.importorskip("bitsandbytes")
    policy = long_answers(family, torch.float32, LoraSettings(rank=4, alpha=8.0, quantize=quantize))
    for name, weight in policy.model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    before = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    results = {}
    for merge in (True, False):
        settings = RolloutSettings(num_generations=2, max_new_tokens=60, temperature=0, merge_adapter=merge)
        results[merge] = RolloutEngine(policy, settings, seed=0).generate(prompts, step=1)
        assert all(torch.equal(weight, before[name]) for name, weight in policy.model.named_parameters())
    for merged, beside in zip(results[True], results[False], strict=True):
        for one, other in zip(merged, beside, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.rollout_logprobs - other.rollout_logprobs).abs().max() < 1e-4
