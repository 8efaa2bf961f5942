"""What an update of Qwen2.5-VL-7B asks of a GPU, counted: launches and element-wise bytes stay below their limits.

One group in bf16 with checkpointing; points are (prefix tokens, responses, response tokens).
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench.case import random_model
from vlm_pg.bench.paper.counter import count, fake_mode
from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.paper.triton_launches import launch_bytes, noted_launches
from vlm_pg.bench.training import grouped, transformers_plain
from vlm_pg.bench.training.case import TrainingCase
from vlm_pg.models.settings import LoraSettings, ModelSettings

pytestmark = pytest.mark.usefixtures("thawed")

# Element-wise bytes (GB) of the pass before norms, rotations, SwiGLU and the head were fused, by the same counter.
BEFORE = {(4096, 8, 128): 349.9, (4096, 8, 512): 633.1, (16384, 8, 1024): 1780.8, (32768, 8, 512): 2432.4}
POINTS = [
    pytest.param(point, marks=[] if point == (4096, 8, 512) else pytest.mark.matrix, id=str(point)) for point in BEFORE
]


@cache
def counted(
    point: tuple[int, int, int],
    liger: bool,
    plain: bool = False,
    lora: str = "",
    chunk_mb: int | None = None,
    fused_logits: bool = False,
) -> Counts:
    """Of our pass over a group, or of ``plain`` transformers over one sequence.

    ``lora``: of these linear layers; ``chunk_mb``: of logits, where it is not left to the model.
    """
    prefix, responses, length = point
    fakes = fake_mode()
    settings = ModelSettings(
        path="7b",
        dtype="bf16",
        gradient_checkpointing=True,
        liger=liger,
        lora=LoraSettings(target_modules=tuple(lora.split())) if lora else None,
        logits_chunk_mb=chunk_mb or "auto",
    )
    build = partial(random_model, "7b", dtype=torch.bfloat16)
    policy = fake_policy(build, settings, fakes, CudaFlashKernel(), fused_logits)
    case = TrainingCase.random(policy, prefix, [length] * (1 if plain else responses))
    return count(lambda: (transformers_plain.batch if plain else grouped.whole)(case), fakes)


@pytest.mark.parametrize("point", POINTS)
def test_elementwise_bytes_with_liger(point: tuple[int, int, int]) -> None:
    pytest.importorskip("liger_kernel")
    counts = counted(point, liger=True)
    # The limit is 0.6; what has been reached is held, with room for the parts that other kernels may add.
    assert counts.bytes_of("elementwise") / 1e9 < 0.4 * BEFORE[point]
    # In each layer forward, when it is recomputed, and backward; two norms, one of each other part.
    layers = 28
    assert counts.launches["_swiglu_forward_kernel"] == 2 * layers
    assert counts.launches["_swiglu_backward_kernel"] == layers
    assert counts.launches["_rms_norm_forward_kernel"] >= 2 * 2 * layers
    assert counts.launches["_triton_rope"] >= 3 * layers


@pytest.mark.parametrize("point", POINTS)
def test_launches_are_at_most_those_of_one_sequence_and_a_third(point: tuple[int, int, int]) -> None:
    ours, plain = counted(point, liger=False), counted(point, liger=False, plain=True)
    assert ours.total_launches <= 1.3 * plain.total_launches


@pytest.mark.parametrize("point", POINTS)
def test_launches_with_liger_on_both_sides(point: tuple[int, int, int]) -> None:
    """What the same limit leaves beside a plain sequence whose norms, rotations and SwiGLU are fused as ours are."""
    pytest.importorskip("liger_kernel")
    ours, plain = counted(point, liger=True), counted(point, liger=True, plain=True)
    assert ours.total_launches <= 1.3 * plain.total_launches


@pytest.mark.matrix
@pytest.mark.parametrize("point", BEFORE, ids=str)
@pytest.mark.parametrize("lora", ["", "q_proj v_proj"], ids=["all trains", "LoRA"])
def test_larger_chunks_of_logits_take_no_more_memory(point: tuple[int, int, int], lora: str) -> None:
    """A layer's backward decides. Least is alive in it where frozen MLPs keep nothing for adapters of their own."""
    pytest.importorskip("liger_kernel")
    ours, small = (counted(point, liger=True, lora=lora, chunk_mb=chunk_mb) for chunk_mb in (None, 256))
    assert ours.peak_bytes == small.peak_bytes
    # Of (4096, 8, 128) a tensor of the MLP is smaller than 256 MiB.
    assert (ours.total_launches < small.total_launches) == (point != (4096, 8, 128))


def test_no_tensor_of_attention_is_widened() -> None:
    """Two levels: parts are merged and gradients added where they lie, in bf16; what is cast to fp32 are logits."""
    pytest.importorskip("liger_kernel")
    counts = counted((4096, 8, 512), liger=True)
    casts = counts.bytes["elementwise", "_to_copy"]
    # 4,096 rows of 152,064 logits to fp32, forward and backward, at 2 + 4 bytes; all others are little beside them.
    head = 2 * 4096 * 152_064 * 6
    assert casts < 1.05 * head


def test_logits_are_read_once_and_their_gradient_is_written_once() -> None:
    pytest.importorskip("liger_kernel")
    ours, torchs = (counted((4096, 8, 512), liger=True, fused_logits=fused) for fused in (True, False))
    logits = 2 * 4096 * 152_064
    for name, times in (("token_statistics", 1), ("logits_gradient", 2)):
        assert logits * times < ours.bytes["elementwise", name] < 1.001 * logits * times
        assert ours.launches[name] == torchs.launches["_log_softmax"]
    assert not ours.launches["_log_softmax"]
    # Those of attention's merging are left.
    assert ours.launches["_softmax"] == torchs.launches["_softmax"] - ours.launches["logits_gradient"]
    # Casts, softmaxes, exponentials, products and sums; 6 % of all bytes.
    assert torchs.total_bytes - ours.total_bytes > 0.06 * torchs.total_bytes
    assert ours.peak_bytes <= torchs.peak_bytes


class TestLaunches:
    """A kernel is noted, and not run."""

    def test_bytes(self) -> None:
        q, k, cos = torch.empty(10), torch.empty(4), torch.empty(3)
        # Queries and keys are rotated where they lie: read and written, at 4 bytes.
        assert launch_bytes("_triton_rope", ["q_ptr", "n", "k_ptr", "cos"], (q, 3, k), {"cos": cos}) == 4 * (20 + 8 + 3)
        assert launch_bytes("another", ["a", "b"], (q, q), {}) == 4 * 20

    def test_of_a_plain_and_of_a_tuned_kernel(self) -> None:
        triton = pytest.importorskip("triton")
        from triton.runtime.jit import JITFunction

        before, found = JITFunction.run, []
        kernel = JITFunction(_kernel)
        tuned = triton.autotune([triton.Config({"SIZE": 1}), triton.Config({"SIZE": 2})], key=["n"])(kernel)
        x = torch.empty(8)
        with noted_launches(lambda *launch: found.append(launch)):
            kernel[(1,)](x, 8, SIZE=1)
            tuned[(1,)](x, 8)
        assert found == [("_kernel", 32), ("_kernel", 32)] and JITFunction.run is before


def _kernel(x_ptr, n, SIZE):  # type: ignore[no-untyped-def]
    raise AssertionError("it runs nowhere")
