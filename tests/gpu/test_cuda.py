"""On a real GPU: kernels against the oracle, the grouped model against the repeated one, liger, offloading."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.test_attention import random_inputs
from tests.numerics.test_long_streams import ALL, INPUTS, STATES, groups_of, use
from tests.support.groups import (
    KINDS,
    check_equal,
    make_case,
    outcome,
    random_group,
    repeated_logprobs,
    tiny_policy,
    weighted_sum,
)
from tests.support.tiny import VL_FAMILY_NAMES, tiny_model, tiny_processor
from tests.unit.models.test_vision import features_and_gradients
from vlm_pg.attention import PrefixTree, grouped_attention
from vlm_pg.attention.kernels import KERNELS, available, select_kernel
from vlm_pg.attention.kernels.oracle import oracle_attention
from vlm_pg.attention.selfcheck import check_kernel
from vlm_pg.models.liger import Liger, liger_of
from vlm_pg.models.loading import make_policy
from vlm_pg.models.offloading import HostMemory
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import FAMILIES
from vlm_pg.models.settings import PARTS, ModelSettings, Switch
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.models.tower import attends_to_all_frames
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import ResponseGroup

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
HALF_PRECISION_KERNELS = ("flash-attn-3", "flash-attn-4", "cuda-flash")
TREES = [
    PrefixTree.from_groups([(300, [17, 1, 64]), (130, [5]), (7, [9, 9])]),
    PrefixTree([200, 30, 40, 5, 1, 130, 2], [-1, -1, 0, 0, 1, 2, 2]),
    PrefixTree([140, 33, 1], [-1, -1, 0]),
]


@pytest.mark.parametrize("tree", TREES, ids=["two levels", "three levels", "one token beside a group without any"])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", KERNELS)
def test_cuda_kernels_equal_the_oracle(name: str, tree: PrefixTree, dtype: torch.dtype, bound: float) -> None:
    if reason := available(CUDA, dtype)[name]:
        pytest.skip(reason)
    inputs = [
        x.detach().repeat(1, 1, 8).to(CUDA, dtype).requires_grad_()
        for x in random_inputs(tree, torch.float64, heads=8, kv_heads=2)
    ]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = grouped_attention(*inputs, tree, kernel=name), oracle_attention(*wide, tree)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(out, inputs, upstream.to(dtype))
    wide_grads = torch.autograd.grad(expected, wide, upstream)
    for part, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *wide_grads), strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < bound, f"{name} {dtype} {part}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_chosen_kernel_passes_its_self_check_at_real_head_sizes(dtype: torch.dtype) -> None:
    kernel = select_kernel(CUDA, dtype)
    assert kernel.name in (HALF_PRECISION_KERNELS if dtype == torch.bfloat16 else ("cuda-efficient",))
    check_kernel(kernel, CUDA, dtype, num_heads=28, num_kv_heads=4, head_dim=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "oracle"])
def test_no_kernel_waits_for_the_device(name: str, dtype: torch.dtype) -> None:
    """Lengths reach the device once per tree; after that a layer queues its work and goes on."""
    tree = TREES[1]
    if reason := available(CUDA, dtype)[name]:
        pytest.skip(reason)
    q, k, v = (torch.randn(tree.num_tokens, n, 64, device=CUDA, dtype=dtype).requires_grad_() for n in (8, 2, 2))

    def layer(*inputs: torch.Tensor) -> None:
        out = grouped_attention(*inputs, tree, kernel=name)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    layer(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_grouped_bf16_is_no_worse_than_repeated_bf16() -> None:
    """Errors of both against the fp32 repeated forward."""
    settings = ModelSettings(path="tiny")
    policy = make_policy(tiny_model().to(CUDA, torch.bfloat16), tiny_processor(), settings)
    reference = tiny_policy()
    plain, repeated = tiny_model(), tiny_model().to(torch.bfloat16)
    # The reference holds the rounded weights too: rounding them is not an error of either side.
    plain.load_state_dict({name: weight.to(torch.bfloat16).float() for name, weight in plain.state_dict().items()})
    grouped_error = repeated_error = 0.0
    for index, kind in enumerate(KINDS):
        case = make_case(reference, kind, seed=index)
        group = random_group(reference, case, [30, 3, 12, 1], seed=index)
        with torch.no_grad():
            expected = repeated_logprobs(plain, case, group.responses)
            half = repeated_logprobs(repeated, case, group.responses)
            ours = policy.logprobs([group])[0]
        grouped_error += sum((a.cpu() - b).abs().sum().item() for a, b in zip(ours, expected, strict=True))
        repeated_error += sum((a - b).abs().sum().item() for a, b in zip(half, expected, strict=True))
    assert grouped_error <= 1.5 * repeated_error


@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
def test_a_tower_over_all_frames_is_no_worse_than_frame_by_frame(family: str) -> None:
    """Features and gradients in bf16, errors of both against fp32."""
    settings = ModelSettings(path="tiny", train=PARTS)
    policy = make_policy(tiny_model(family).to(CUDA, torch.bfloat16), tiny_processor(family), settings)
    reference = tiny_policy(family=family, train=PARTS)
    reference.model.load_state_dict({name: x.cpu().float() for name, x in policy.model.state_dict().items()})
    expected, errors = features_and_gradients(reference), []
    for attention in ("sdpa", "eager"):
        policy.model.set_attn_implementation({"vision_config": attention})
        assert attends_to_all_frames(policy.family.vision_tower(policy.model)) == (attention == "sdpa")
        found = features_and_gradients(policy)
        pairs = zip(found, expected, strict=True)
        errors.append(sum(((a.cpu().float() - b).norm() / b.norm().clamp_min(1e-6)).item() for a, b in pairs))
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_training_agree_on_the_device(family: str) -> None:
    model = tiny_model(family).to(CUDA)
    settings = ModelSettings(path="tiny", train=PARTS if family in VL_FAMILY_NAMES else ("language",))
    policy = make_policy(model, tiny_processor(family), settings)
    prompts = [make_case(policy, kind, seed=i).prompt for i, kind in enumerate(KINDS)]
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, max_new_tokens=24), seed=0)
    sampled = engine.generate(prompts, step=1)
    groups = [ResponseGroup(p, tuple(r.token_ids for r in rs)) for p, rs in zip(prompts, sampled, strict=True)]
    scored = policy.logprobs(groups)
    for rollouts, logprobs in zip(sampled, scored, strict=True):
        for rollout, expected in zip(rollouts, logprobs, strict=True):
            assert (rollout.rollout_logprobs - expected.cpu()).abs().max() < 1e-4
    weighted_sum(scored).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.model.parameters() if p.requires_grad)


def liger_policy(liger: Switch, dtype: torch.dtype) -> Policy:
    model = tiny_model().to("cuda", dtype)
    return make_policy(model, tiny_processor(), ModelSettings(path="tiny", liger=liger))


@pytest.mark.parametrize("switch", [True, "auto"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_liger_kernels_give_the_same_values_and_gradients(dtype: torch.dtype, bound: float, switch: Switch) -> None:
    pytest.importorskip("liger_kernel")
    plain = liger_policy(False, dtype)
    plain.fused_logits = False
    case = make_case(plain, "video", 0)
    groups = [random_group(plain, case, [5, 9, 1], 1)]
    fast = liger_policy(switch, dtype)
    assert liger_of(fast.model) == Liger(("rms_norm", "swiglu", "rope"))
    assert fast.fuses_logits(dtype) == (dtype == torch.bfloat16)
    from vlm_pg.models.liger_layers import swiglu

    assert fast.model.model.language_model.layers[0].mlp.forward.__func__ is swiglu
    results = []
    for one in (plain, fast):
        logprobs = torch.cat(one.logprobs(groups)[0])
        logprobs.sum().backward()
        gradients = {name: p.grad.float() for name, p in one.model.named_parameters() if p.grad is not None}
        results.append((logprobs.detach(), gradients))
    (expected, expected_gradients), (logprobs, gradients) = results
    assert (logprobs - expected).norm() <= bound * expected.norm()
    largest = max(gradient.norm() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= bound * max(gradient.norm(), 1e-2 * largest), name


@pytest.mark.parametrize("chunk_tokens", [None, 12], ids=["whole", "chunks"])
@pytest.mark.parametrize("choice", [INPUTS, STATES, ALL], ids=["inputs", "states", "all"])
def test_offloading_tiles_and_pieces_change_nothing(choice: MemoryChoice, chunk_tokens: int | None) -> None:
    settings = ModelSettings(path="tiny", train=PARTS, gradient_checkpointing=True, attention_kernel="cuda-efficient")
    policy = make_policy(tiny_model().cuda(), tiny_processor(), settings)
    groups = groups_of(policy)
    expected = outcome(policy, groups, chunk_tokens)
    use(policy, choice)
    for _ in range(3):  # streams of their own: a race would not show every time
        check_equal(outcome(policy, groups, chunk_tokens), expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (16, 70_001)])
def test_host_memory_behind_a_busy_gpu(shape: tuple[int, int]) -> None:
    """The copy waits for the values; their memory and the host's are reused as soon as allowed."""
    target = HostMemory(CUDA)
    work = torch.randn(4096, 4096, device=CUDA)
    expected, stored = [], []
    for number in range(8):
        for _ in range(4):
            work = (work @ work).clamp_(-1, 1)
        # Each of the next ones is made in memory that the one before has left.
        tensor = work[0, 0] * 0 + torch.full(shape, float(number), device=CUDA).t()
        expected.append(torch.full(shape, float(number)).t())
        stored.append(target.put(tensor))
        del tensor
    for wanted, offloaded in zip(expected, stored, strict=True):
        for _ in range(2):
            assert torch.equal(offloaded.get().cpu(), wanted)
