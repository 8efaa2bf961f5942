"""What each contestant of ``bench step`` computes, by formula, against a count of its operations."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel, CudaFlashKernel
from vlm_pg.bench.case import random_model
from vlm_pg.bench.flops import chunk_rows, done_flops, least_step_flops
from vlm_pg.bench.paper.counter import count, fake_mode
from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.fake import fake_policy
from vlm_pg.bench.shapes import SIZES, LanguageShape
from vlm_pg.bench.step import CONTESTANTS, OURS
from vlm_pg.bench.training.case import TrainingCase
from vlm_pg.bench.work import StepDone, chunked_done, grouped_done, prefix_grouper_done
from vlm_pg.models.settings import ModelSettings
from vlm_pg.processes import resolve

pytestmark = pytest.mark.usefixtures("thawed")

TINY = LanguageShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)


def counted(
    size: str,
    name: str,
    prefix: int,
    lengths: list[int],
    kernel: Kernel,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> Counts:
    fakes = fake_mode()
    policy = fake_policy(partial(random_model, size, dtype=dtype), ModelSettings(path=size, **settings), fakes, kernel)
    case = TrainingCase.random(policy, prefix, lengths)
    return count(lambda: case.run(resolve(CONTESTANTS[name].run)), fakes)


def test_ours_by_hand() -> None:
    # Prefix of 3, responses of 3 and 2. Of the last layer three response rows and the prefix's last one are read; its
    # two other rows give keys and values. Pairs there: 3 for the prefix's row, 2*3 + 1+2 and 3 + 1 for the responses.
    assert grouped_done(3, [3, 2], 5) == StepDone(6, 4, 2, 19, 3 + 9 + 4, 5, 0, True)
    # Five rows of logits do not fit into four, so all of them are computed twice.
    assert grouped_done(3, [3, 2], 4).logit_rows_again == 5


def test_chunks_by_hand() -> None:
    # 800 tokens of each go into chunks of 1,024: one each. Only what is beyond 800 rows a chunk is computed again.
    assert chunked_done(10, [801, 801], 800).logit_rows_again == 1602
    assert chunked_done(10, [801, 801], 801).logit_rows_again == 0


def test_prefix_grouper_pads_in_attention_alone() -> None:
    # Responses of 2 and 1 own tokens behind 3: two suffixes of 2. A mask computes 2 * 5 pairs each, else 2 * 3 + 1 + 2.
    assert prefix_grouper_done(3, [3, 2], 9, masked=True) == StepDone(6, 6, 0, 6 + 20, 6 + 20, 5, 0, False)
    assert prefix_grouper_done(3, [3, 2], 9, masked=False).pairs == 6 + 18


def test_operations_of_a_step_by_hand() -> None:
    done = StepDone(6, 4, 2, 19, 16, 5, 5, True)
    mlp, projections, keys = 2 * 3 * 8 * 16, 2 * (64 + 32 + 32 + 64), 2 * 8 * 4
    forward = 6 * (mlp + projections) + 4 * (mlp + projections) + 2 * 2 * keys
    pairs, head = (19 + 16) * 4 * 8, 2 * 8 * 10
    plain = 3 * forward + 3.5 * pairs + head * (3 * 5 + 5)
    assert done_flops(TINY, done, False) == plain
    # Computed again: all but each MLP's last product, and keys without values.
    again = 10 * (mlp * 2 // 3 + projections) + 2 * keys
    assert done_flops(TINY, done, True) == plain + again


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_formula_is_what_is_counted(name: str, checkpointing: bool) -> None:
    if reason := CONTESTANTS[name].unavailable_because():
        pytest.skip(reason)
    # A ragged group, and logits that do not fit into one chunk (16 MiB: 1,024 rows of 4,096).
    prefix, lengths = 200, [600, 700, 100]
    settings = {"gradient_checkpointing": checkpointing, "logits_chunk_mb": 16}
    found = counted("small", name, prefix, lengths, CpuFlashKernel(), **settings)
    done = CONTESTANTS[name].done
    assert done is not None
    shape = SIZES["small"]
    expected = done_flops(shape, done(prefix, lengths, 16 * 2**20 // (4 * shape.vocab), True), checkpointing)
    assert found.total_flops == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["prefix-grouper-kind", "prefix-grouper-readme"])
@pytest.mark.parametrize(
    "kernel,dtype,masked",
    [
        (CudaFlashKernel(), torch.bfloat16, False),
        (CudaFlashKernel(), torch.float32, True),
        (CpuFlashKernel(), torch.bfloat16, True),
    ],
    ids=["GPU", "GPU in fp32", "CPU"],
)
def test_prefix_grouper_has_a_mask_only_where_flash_attention_does_not_run(
    name: str, kernel: Kernel, dtype: torch.dtype, masked: bool
) -> None:
    if reason := CONTESTANTS[name].unavailable_because():
        pytest.skip(reason)
    done = CONTESTANTS[name].done
    assert done is not None
    # Suffixes about as long as the prefix: a mask hides nearly a quarter of their pairs.
    prefix, lengths, shape = 250, [300, 200], SIZES["small"]
    found = counted("small", name, prefix, lengths, kernel, dtype)
    expected = done_flops(shape, done(prefix, lengths, chunk_rows(shape), masked), False)
    assert found.total_flops == pytest.approx(expected, rel=1e-4)
    operator = "_scaled_dot_product_flash_attention"
    assert (found.launches[operator] > 0) == (not masked)


FAR = [(4096, 8, 128), (16384, 8, 1024), (32768, 8, 512)]


@pytest.mark.parametrize(
    "prefix,count,response", [(4096, 8, 512), *(pytest.param(*point, marks=pytest.mark.matrix) for point in FAR)]
)
def test_an_update_of_7b_does_the_least_there_is(prefix: int, count: int, response: int) -> None:
    """With checkpointing what a GPU computes is the least possible and what is computed again, and nothing else."""
    shape, lengths = SIZES["7b"], [response] * count
    found = counted("7b", OURS, prefix, lengths, CudaFlashKernel(), torch.bfloat16, gradient_checkpointing=True)
    least = least_step_flops(shape, prefix, lengths)
    does = done_flops(shape, grouped_done(prefix, lengths, chunk_rows(shape)), True)
    assert found.total_flops - (does - least) <= 1.02 * least
    assert found.total_flops == pytest.approx(does, rel=1e-3)


@pytest.mark.parametrize(
    "prefix,count,response", [(4096, 8, 128), *(pytest.param(*point, marks=pytest.mark.matrix) for point in FAR[1:])]
)
def test_without_recomputation_nothing_is_done_twice(prefix: int, count: int, response: int) -> None:
    """Counted alone, with no formula between: a pass that holds all its activations and logits."""
    lengths = [response] * count
    found = counted("7b", OURS, prefix, lengths, CudaFlashKernel(), torch.bfloat16, logits_chunk_mb=100_000)
    assert found.total_flops <= 1.02 * least_step_flops(SIZES["7b"], prefix, lengths)
