"""Layer inputs and prefix states in pinned host memory, tiles and pieces, on a GPU: same values and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.test_long_streams import ALL, INPUTS, STATES, groups_of, use
from tests.support.groups import check_equal, outcome
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.models.loading import make_policy
from vlm_pg.models.offloading import HostMemory
from vlm_pg.models.settings import PARTS, ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("chunk_tokens", [None, 12], ids=["whole", "chunks"])
@pytest.mark.parametrize("choice", [INPUTS, STATES, ALL], ids=["inputs", "states", "all"])
def test_on_a_gpu(choice: MemoryChoice, chunk_tokens: int | None) -> None:
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
