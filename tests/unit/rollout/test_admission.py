"""What generation books is what it holds; prompts that share follow each other; a small budget says what is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import vlm_pg.rollout.engine as generation
from tests.support.groups import make_case, tiny_policy
from tests.support.tiny import FAMILY_NAMES
from tests.unit.rollout.test_prefill import prefilled
from vlm_pg.distributed import SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB
from vlm_pg.models.policy import Policy
from vlm_pg.rollout import admission
from vlm_pg.rollout.admission import TokenCosts, WaitingPrompts, budget_bytes, check_fits, rounds
from vlm_pg.rollout.decoding import DecodeContext, OwnTokens
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.ragged import row_bucket
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.parallel import sample_together
from vlm_pg.types import Prompt

TWO = SequenceGroup(2, 0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture(scope="module")
def prompts(policy: Policy) -> list[Prompt]:
    """Questions on video 9, alone, on video 6, on 9, on 6, on 9."""
    media = (9, None, 6, 9, 6, 9)
    video = {"kind": "video", "max_side": 8}
    kinds = [{"kind": "text"} if seed is None else video | {"media_seed": seed} for seed in media]
    return [make_case(policy, seed=i, **kind).prompt for i, kind in enumerate(kinds)]


def test_prompts_that_share_a_video_follow_each_other(prompts: list[Prompt]) -> None:
    waiting = WaitingPrompts(prompts)
    assert list(waiting) == waiting.take(6) == [0, 3, 5, 1, 2, 4]
    assert not len(waiting)
    shared = {path[0] for path in (waiting.paths[0], waiting.paths[3], waiting.paths[5])}
    assert len(shared) == 1 and len(waiting.paths[0]) == 2 and len(waiting.paths[1]) == 1


def test_paths_spell_the_prompts(prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    for together in (2, 128):
        monkeypatch.setattr(admission, "COMPARED_TOGETHER", together)
        waiting = WaitingPrompts(prompts)
        for prompt, path in zip(prompts, waiting.paths, strict=True):
            nodes = [waiting.nodes[node] for node in path]
            assert [node.parent for node in nodes] == [-1, *path[:-1]]
            ids = [prompts[node.owner].input_ids[node.start : node.stop] for node in nodes]
            assert torch.equal(torch.cat(ids), prompt.input_ids)
        assert sorted(waiting) == list(range(len(prompts)))


def test_a_node_is_needed_until_its_last_reader_is_done(prompts: list[Prompt]) -> None:
    waiting = WaitingPrompts(prompts)
    video, question = waiting.paths[0]
    waiting.done(0)
    assert waiting.is_needed(video) and not waiting.is_needed(question)
    waiting.done(5)
    assert waiting.is_needed(video)
    waiting.done(3)
    assert not waiting.is_needed(video)


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((name, torch.float32) for name in FAMILY_NAMES),
        *((name, torch.bfloat16) for name in ("qwen2_5_vl", "qwen3_5")),
    ],
)
@torch.no_grad()
def test_costs_are_those_of_the_tensors(family: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(family=family, dtype=dtype)
    prompt = make_case(policy, "text", 0).prompt
    _, store, _ = prefilled(policy, [prompt])
    costs = TokenCosts.of(policy)
    states = [states for of_layer in store.states.values() for states in of_layer.values()]
    assert size(*store.keys.values(), *store.values.values()) == prompt.num_tokens * costs.per_token
    assert sum(size(one.conv_tail, one.recurrent) for one in states) == costs.per_state
    own = OwnTokens([(0,)] * 3)
    policy.hidden_states(torch.tensor([5, 6, 7]), torch.full((3, 3), 9), DecodeContext(store, [own], policy.kernel))
    grown = size(*(tensor for pair in own._keys_values.values() for tensor in pair))
    assert grown == 3 * 64 * costs.per_token
    assert sum(size(one.conv_tail, one.recurrent) for one in own._states.values()) == 3 * costs.per_state


def test_a_budget_is_stated_or_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert budget_bytes(RolloutSettings(memory_gb=0.5), cpu) == GIB // 2
    monkeypatch.setattr("vlm_pg.memory.free_host_bytes", lambda: 10 * GIB)
    assert budget_bytes(RolloutSettings(), cpu) == 6 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert budget_bytes(RolloutSettings(), cpu) == 3 * GIB


def of_lengths(policy: Policy, lengths: Sequence[int]) -> list[Prompt]:
    """Prompts of text that have nothing in common."""
    ids = [torch.randint(20, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    return [Prompt(str(len(one)), one, torch.zeros_like(one), torch.arange(len(one)).expand(3, -1)) for one in ids]


def test_one_group_beyond_the_budget_says_how_much_is_needed(policy: Policy) -> None:
    """To all processes alike, also to the one whose own rollouts would fit."""
    check_fits(GIB, GIB, "17", RolloutSettings())
    with pytest.raises(ConfigError, match=r"needs 2 GiB .* sample 17\), but generation may take 1 GiB. Raise"):
        check_fits(2 * GIB, GIB, "17", RolloutSettings())
    settings = RolloutSettings(num_generations=3, max_new_tokens=8, divide_prefix="never")
    costs, prompts = TokenCosts.of(policy), of_lengths(policy, (40,))
    needed = 40 * costs.per_token + 2 * costs.rollout(settings)
    for rank in range(2):
        group = SequenceGroup(2, rank)
        assert list(rounds(policy, settings, prompts, needed, group)) == [([0], False)]
        with pytest.raises(ConfigError, match=r"the media's size, or set rollout\.divide_prefix=auto\."):
            list(rounds(policy, settings, prompts, needed - 1, group))


def test_rounds_count_the_rows_that_decoding_makes_of_the_largest_share(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rollouts on two processes are three on one of them, and three prompts of three fill sixteen rows."""
    lengths = (40, 41, 42, 43)
    prompts, costs = of_lengths(policy, lengths), TokenCosts.of(policy)
    settings = RolloutSettings(num_generations=5, max_new_tokens=8)
    room_for_three = sum(lengths[1:]) * costs.per_token + 9 * costs.rollout(settings)
    assert list(rounds(policy, settings, prompts, room_for_three, TWO)) == [([0, 1, 2], False), ([3], False)]

    class Buckets:
        def rows_for(self, rollouts: int) -> int:
            return row_bucket(rollouts)

        def prompt_room(self, tokens: int) -> int:
            return tokens

    monkeypatch.setattr(admission, "decoder_for", lambda *_: Buckets())
    assert row_bucket(9) > 9
    assert list(rounds(policy, settings, prompts, room_for_three, TWO)) == [([0, 1], False), ([2, 3], False)]


def test_a_round_is_admitted_whole(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a process would book by itself: a prefill is for all of them."""
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, max_new_tokens=8), seed=0)
    batch: Any = generation._ContinuousBatch(engine, of_lengths(policy, (40, 41, 42)), 1, TWO, 1)
    started: list[list[int]] = []
    monkeypatch.setattr(batch, "_start", lambda chosen, stored, new: started.append(list(chosen)))
    batch._admit()
    assert [sorted(chosen) for chosen in started] == [[0, 1, 2]]


def test_what_does_not_fit_whole_is_divided_by_itself(policy: Policy) -> None:
    """Two short prompts fit together and whole; of two long ones each fits in halves."""
    settings, costs = RolloutSettings(num_generations=4, max_new_tokens=8), TokenCosts.of(policy)
    prompts, rollouts = of_lengths(policy, (400, 30, 401, 31)), 2 * costs.rollout(settings)
    # A pass: of its rows that are read and of the others each a half, rounded up.
    halves = [(length + 1) // 2 + 2 for length in (400, 401)]
    budget = max(halves) * costs.per_token + rollouts
    assert 2 * 31 * costs.per_token + 2 * rollouts <= budget < 400 * costs.per_token
    expected = [([0], True), ([1], False), ([2], True), ([3], False)]
    assert list(rounds(policy, settings, prompts, budget, TWO)) == expected
    with pytest.raises(ConfigError, match=r"Raise rollout.memory_gb to at least .* the media's size\."):
        list(rounds(policy, settings, prompts, budget - 1, TWO))
    room = 2 * rollouts + sum(halves) * costs.per_token
    assert list(rounds(policy, settings, of_lengths(policy, (401, 400)), room, TWO)) == [([0], False), ([1], False)]
    for divide, is_divided in (("always", True), ("auto", False), ("never", False)):
        chosen = settings.model_copy(update={"divide_prefix": divide})
        assert list(rounds(policy, chosen, of_lengths(policy, (40, 41)), 2**30, TWO)) == [([0, 1], is_divided)]


@pytest.mark.parametrize(
    ("divide", "questions", "length", "together"),
    [("auto", 2, 40, False), ("auto", 1, 40, True), ("auto", 2, 400, True), ("always", 2, 40, True),
     ("never", 2, 400, False)],
)  # fmt: skip
def test_processes_sample_together_what_one_cannot(
    policy: Policy, divide: Any, questions: int, length: int, together: bool
) -> None:
    """With as many questions as processes each samples its own, unless some group is beyond one of them."""

    class Agreeing(SequenceGroup):
        def gather(self, value: Any) -> list[Any]:
            return [value] * self.size

    costs = TokenCosts.of(policy)
    settings = RolloutSettings(num_generations=4, max_new_tokens=8, divide_prefix=divide)
    room = 300 * costs.per_token + 4 * costs.rollout(settings)
    settings = settings.model_copy(update={"memory_gb": room / 2**30})
    engine, prompts = RolloutEngine(policy, settings, seed=0), of_lengths(policy, range(length, length + questions))
    assert sample_together(Agreeing(2, 0), engine, prompts, "auto") == together
    assert not sample_together(Agreeing(2, 0), engine, prompts, "questions")
    assert not sample_together(SequenceGroup(), engine, prompts, "auto")


def test_processes_in_lockstep_cannot_divide_a_prompt() -> None:
    policy = tiny_policy()
    policy.lockstep = object()  # type: ignore[assignment]
    engine = RolloutEngine(policy, RolloutSettings(num_generations=4, divide_prefix="always"), seed=0)
    with pytest.raises(ConfigError, match=r"divide_prefix is always, but under ZeRO-3 .*rollout\.gather=all"):
        sample_together(TWO, engine, of_lengths(policy, (40,)), "auto")
