"""However prompts are cut into nodes, pieces and passes, the same keys, values, states and attention come out."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from tests.support.groups import Case, make_case, plain_model, positions_4P, tiny_policy
from tests.support.table_kernel import TableKernel
from tests.support.tiny import FAMILY_NAMES
from vlm_pg.attention.kernels.oracle import OracleKernel
from vlm_pg.attention.kernels.torch_kernels import CpuFlashKernel
from vlm_pg.models.linear_attention import LinearStates
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import prefix_attention
from vlm_pg.rollout.admission import WaitingPrompts
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.prefill import Piece, Prefill, cut_into_passes
from vlm_pg.rollout.prefix_attention import SplitPrefixAttention, pieces_of, rounded_down
from vlm_pg.types import Prompt

VIDEO = {"kind": "video", "media_seed": 9, "max_side": 8}


def cases(policy: Policy) -> list[Case]:
    """Two questions on a video, one on several images, one without media."""
    kinds = (VIDEO, {"kind": "images"}, VIDEO, {"kind": "text"})
    return [make_case(policy, seed=seed, **kind) for seed, kind in enumerate(kinds)]


def prefilled(
    policy: Policy, prompts: list[Prompt], budget: int = 10_000, layers: AbstractContextManager[None] | None = None
) -> tuple[WaitingPrompts, PrefixStore, list[torch.Tensor]]:
    """The stored prompts, and the hidden state at the end of each."""
    waiting, store = WaitingPrompts(prompts), PrefixStore()
    lengths = {node: item.num_tokens for node, item in enumerate(waiting.nodes)}
    store.rearrange((), lengths)
    prefill = Prefill(policy, store, waiting.nodes, prompts, budget, lambda: None, layers=layers)
    hidden = prefill.run(list(lengths), [path[-1] for path in waiting.paths])
    return waiting, store, [hidden[path[-1]] for path in waiting.paths]


def test_passes_hold_the_budget_and_cover_every_token_once() -> None:
    passes = list(cut_into_passes({3: 5, 4: 12, 8: 2}, 7))
    assert passes == [[Piece(3, 0, 5), Piece(4, 0, 2)], [Piece(4, 2, 9)], [Piece(4, 9, 12), Piece(8, 0, 2)]]
    # The last pass takes along what would be one of few tokens.
    assert list(cut_into_passes({3: 5, 4: 12}, 8, 1)) == [[Piece(3, 0, 5), Piece(4, 0, 3)], [Piece(4, 3, 12)]]
    assert [len(one) for one in cut_into_passes({3: 8, 4: 2}, 8, 1)] == [1, 1]
    assert not list(cut_into_passes({}, 8)) and len(list(cut_into_passes({3: 8}, 8))) == 1


@pytest.mark.parametrize(
    "family, budget",
    [
        *((name, 17) for name in FAMILY_NAMES),
        *((name, budget) for name in ("qwen2_5_vl", "qwen3_5") for budget in (130, 10_000)),
    ],
)
@torch.no_grad()
def test_any_cut_gives_transformers_hidden_states(family: str, budget: int) -> None:
    policy = tiny_policy(family=family)
    found = cases(policy)
    oracle = plain_model(policy)
    waiting, store, hidden = prefilled(policy, [case.prompt for case in found], budget)
    stored, whole = sum(store.lengths.values()), sum(case.prompt.num_tokens for case in found)
    assert stored < whole, "the video should be stored once"
    for case, own in zip(found, hidden, strict=True):
        inputs = {k: v for k, v in case.inputs.items() if k != "video_metadata"}
        if policy.family.reads_media:
            inputs["position_ids"] = positions_4P(case.prompt)
        expected = oracle(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
        assert (own - expected).abs().max() < 2e-5
    whole = prefilled(policy, [case.prompt for case in found])[1]
    for layer in whole.keys:
        assert (store.keys[layer] - whole.keys[layer]).abs().max() < 5e-5
        assert (store.values[layer] - whole.values[layer]).abs().max() < 5e-5
    for layer, states in whole.states.items():
        ends = [path[-1] for path in waiting.paths]
        cut, uncut = store.read_states(layer, ends), whole.read_states(layer, ends)
        assert torch.allclose(cut.conv_tail, uncut.conv_tail, atol=5e-5)
        assert torch.allclose(cut.recurrent, uncut.recurrent, atol=5e-5)
        assert states


def test_a_stop_request_is_polled_at_every_layer() -> None:
    policy = tiny_policy()
    prompts = [make_case(policy, "text", 0).prompt]
    store, calls = PrefixStore(), []
    store.rearrange((), {0: prompts[0].num_tokens})

    def stop() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise InterruptedError

    prefill = Prefill(policy, store, WaitingPrompts(prompts).nodes, prompts, 10_000, stop)
    with torch.no_grad(), pytest.raises(InterruptedError):
        prefill.run([0], [0])
    assert list(store.keys) == [0]


LENGTHS = {4: 3, 7: 5, 9: 2}


def filled() -> tuple[PrefixStore, dict[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    store = PrefixStore()
    store.rearrange((), LENGTHS)
    rows = {node: torch.randn(length, 2, 4, generator=generator) for node, length in LENGTHS.items()}
    for node, k in rows.items():
        # In two parts, the second first.
        for part in (slice(2, None), slice(0, 2)):
            if k[part].shape[0]:
                store.write(0, node, part.start, k[part], -k[part])
        tail = torch.full((1, 3, 6), float(node)).bfloat16()
        store.write_states(1, node, LinearStates(tail, torch.full((1, 2, 4, 4), float(node))))
    return store, rows


def test_nodes_are_read_as_they_were_written() -> None:
    store, rows = filled()
    assert sum(store.lengths.values()) == 10 and store.order == [4, 7, 9]
    k, v = store.read(0, [(9, 2), (7, 4)])
    assert torch.equal(k, torch.cat([rows[9], rows[7][:4]])) and torch.equal(v, -k)
    states = store.read_states(1, [7, 7, 4])
    assert states.recurrent[:, 0, 0, 0].tolist() == [7, 7, 4]
    assert states.conv_tail.dtype == torch.bfloat16 and states.recurrent.dtype == torch.float32


def test_what_stays_is_moved_and_what_goes_is_forgotten() -> None:
    store, rows = filled()
    store.rearrange({9, 4}, {12: 6})
    assert store.order == [4, 9, 12] and sum(store.lengths.values()) == 11
    assert store.keys[0].shape[0] == store.values[0].shape[0] == 11
    k, v = store.read(0, [(4, 3), (9, 2)])
    assert torch.equal(k, torch.cat([rows[4], rows[9]])) and torch.equal(v, -k)
    assert sorted(store.states[1]) == [4, 9]
    new = torch.ones(6, 2, 4)
    store.write(0, 12, 0, new, new)
    assert torch.equal(store.read(0, [(12, 6)])[0], new)
    assert torch.equal(store.read(0, [(9, 2)])[0], rows[9])


def test_a_call_names_every_stored_node_in_its_place() -> None:
    store, _ = filled()
    call = store.call({9: 4, 4: 1})
    assert call.query_lengths == (1, 0, 4) and call.key_lengths == (3, 5, 2)
    assert call.query_range == (0, 5) and call.key_range == (0, 10) and not call.causal


HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def test_pieces_are_few_and_nearly_equal() -> None:
    assert prefix_attention.cut(10, 3) == (3, 3, 4)
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


def random_store(lengths: list[int]) -> PrefixStore:
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
    store, generator = random_store(lengths), torch.Generator().manual_seed(2)
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
