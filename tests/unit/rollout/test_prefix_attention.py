"""Prompts in pieces: as many as fill the device, and the same attention as in one."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.test_rollout import assert_same, engine, questions, ragged_stops
from tests.support.groups import tiny_policy
from tests.support.table_kernel import TableKernel
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.rollout import prefix_attention
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.prefix_attention import SplitPrefixAttention, pieces_of, rounded_down
from vlm_pg.rollout.ragged import RaggedDecoder

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def test_pieces_are_nearly_equal_and_make_up_the_node() -> None:
    assert prefix_attention.cut(10, 3) == (3, 3, 4)
    assert prefix_attention.cut(7, 1) == (7,)


def test_numbers_of_pieces_are_few() -> None:
    assert sorted({rounded_down(n) for n in range(1, 130)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert all(2 * n / 3 <= rounded_down(n) <= n for n in range(2, 200))


@pytest.mark.parametrize(
    "tokens, queries, pieces",
    [
        # One prompt, 4 rollouts of 28 query heads on 4 key-value heads: 66 pieces of 4 blocks would be 264.
        ([65536], [28], [64]),
        # 8 rollouts: 54 pieces have 12,288 rows together, one for each query and head.
        ([65536], [56], [48]),
        # Its pieces have at least 256 keys.
        ([4096], [56], [16]),
        # 20 rollouts: two tiles of queries, so 33 pieces would be enough; 21 have 12,288 rows together.
        ([65536], [140], [16]),
        # 300 rollouts fill the device by themselves.
        ([65536], [2100], [1]),
        # At least 4 keys for each query: 896.
        ([4096], [224], [4]),
        # 64 prompts take 256 blocks as they are.
        ([4096] * 64, [56] * 64, [1] * 64),
        # A long one among short ones: 4 x (65,536 + 4 x 1,024) / 264 is 1,055 keys, of which 65,536 has 62.
        ([65536] + [1024] * 4, [56] * 5, [48, 1, 1, 1, 1]),
    ],
)
def test_blocks_fill_the_device_once(tokens: list[int], queries: list[int], pieces: list[int]) -> None:
    nodes = range(len(tokens))
    lengths, rows = dict(zip(nodes, tokens, strict=True)), dict(zip(nodes, queries, strict=True))
    got = pieces_of(lengths, rows, kv_heads=4, tiles_at_once=264)
    assert list(got.values()) == pieces
    assert sum(4 * -(-rows[node] // 128) * got[node] for node in nodes) <= 264
    assert set(pieces_of(lengths, rows, kv_heads=4, tiles_at_once=None).values()) == {1}


def stored(lengths: list[int]) -> PrefixStore:
    generator = torch.Generator().manual_seed(1)
    store = PrefixStore()
    store.rearrange((), dict(enumerate(lengths)))
    for node, length in enumerate(lengths):
        k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
        store.write(0, node, 0, k, v)
    return store


PATHS = {
    "one prompt": [(0,)] * 3,
    "equally many rollouts": [(0,), (1,), (0,), (1,)],
    "one rollout more": [(0,), (1,), (0,), (1,), (1,)],
    "an idle row": [(0,), (), (1,), (1,)],
    "trees": [(0, 2), (1,), (0, 3), (0, 2), (1, 4), (0,), (5, 3)],
}


@pytest.mark.parametrize("kernel", [CpuFlashKernel, OracleKernel, TableKernel])
@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS)
def test_pieces_attend_to_what_whole_nodes_do(
    paths: list[tuple[int, ...]], kernel: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one softmax over all keys of each row, its own one first."""
    monkeypatch.setattr(prefix_attention, "LEAST_KEYS", 4)
    monkeypatch.setattr(prefix_attention, "LEAST_KEYS_A_QUERY", 0)
    lengths = [29, 60, 13, 9, 30, 17]
    store, generator = stored(lengths), torch.Generator().manual_seed(2)
    q = torch.randn(len(paths), HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    own_k, own_v = torch.randn(2, len(paths), KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    cutting = kernel()
    cutting.multiprocessors = 8
    calls: list[int] = []
    whole = cutting.segments_forward

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: object, scale: float) -> object:
        calls.append(len(call.query_lengths))  # type: ignore[attr-defined]
        return whole(q, k, v, call, scale)

    monkeypatch.setattr(cutting, "segments_forward", counted)
    repeats = HEADS // KV_HEADS
    merged = own_v.repeat_interleave(repeats, 1)
    lse = 0.25 * (q * own_k.repeat_interleave(repeats, 1)).sum(-1).transpose(0, 1).contiguous()
    levels = SplitPrefixAttention(store, cutting, (HEADS, KV_HEADS), q.device)
    levels.arrange([(0,)] * len(paths))  # what an earlier arrangement has left does not matter
    levels.arrange(paths)
    levels.merge_into(0, q, merged, lse, 0.25)
    assert max(calls) > len(lengths), "some node was in pieces"
    starts = [sum(lengths[:node]) for node in range(len(lengths))]
    for row, path in enumerate(paths):
        keys, values = (
            torch.cat([own[row][None], *(of[0][starts[n] : starts[n] + lengths[n]] for n in path)])
            for own, of in ((own_k, store.keys), (own_v, store.values))
        )
        scores = 0.25 * torch.einsum("nh,tnh->nt", q[row], keys.repeat_interleave(repeats, 1))
        expected = torch.einsum("nt,tnh->nh", scores.softmax(-1), values.repeat_interleave(repeats, 1))
        assert (merged[row] - expected).abs().max() < 1e-12, row
        assert (lse[:, row] - scores.logsumexp(-1)).abs().max() < 1e-12, row


def test_the_engine_samples_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    ragged_stops(policy)
    prompts = questions(policy)
    settings = {"num_generations": 3, "max_batch_rollouts": 7}
    expected = engine(policy, **settings).generate(prompts, step=4)
    monkeypatch.setattr("vlm_pg.rollout.engine.decoder_for", RaggedDecoder)
    monkeypatch.setattr(prefix_attention, "LEAST_KEYS", 2)
    monkeypatch.setattr(prefix_attention, "LEAST_KEYS_A_QUERY", 0)
    monkeypatch.setattr(CpuFlashKernel, "multiprocessors", 16)
    pieces: set[int] = set()

    def noted(*args: object) -> dict[int, int]:
        found = pieces_of(*args)  # type: ignore[arg-type]
        pieces.update(found.values())
        return found

    monkeypatch.setattr("vlm_pg.rollout.prefix_attention.pieces_of", noted)
    assert_same(engine(policy, **settings).generate(prompts, step=4), expected)
    assert len(pieces) > 2
