"""Everybody generates the tokens of a plain greedy loop; who does not, or cannot, is told apart from a tie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import vlm_pg.bench.generation.transformers_continuous as continuous
from vlm_pg.bench import worker
from vlm_pg.bench.case import SPECIAL_IDS, random_model, set_attention
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.generation.case import (
    Generate,
    GenerationCase,
    check_count,
    check_tokens,
    equal_share,
    never_choose_special_tokens,
)
from vlm_pg.bench.rollout import CONTESTANTS, RolloutRun
from vlm_pg.models.loading import make_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.processes import resolve

PREFIX, GENERATIONS, NEW_TOKENS, GROUPS = 300, 2, 6, 3
CONTINUOUS = "transformers-continuous"
SESSIONS = {name: resolve(entry.run) for name, entry in CONTESTANTS.items()}


@pytest.fixture(scope="module")
def case() -> GenerationCase:
    policy = make_policy(random_model("small"), None, ModelSettings(path="bench"))
    never_choose_special_tokens(policy)
    return GenerationCase.random(policy, PREFIX, GENERATIONS, NEW_TOKENS, GROUPS)


@pytest.fixture(scope="module")
def greedy(case: GenerationCase) -> torch.Tensor:
    """int64 [B*G, N]: the whole sequence read again for every token, no keys and values kept."""
    set_attention(case, "sdpa")
    ids = case.prompts
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = case.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, PREFIX:].repeat_interleave(GENERATIONS, dim=0)


@pytest.mark.parametrize("name", list(CONTESTANTS))
@pytest.mark.parametrize("new_tokens", [1, NEW_TOKENS])
def test_everybody_generates_the_same_tokens(
    case: GenerationCase, greedy: torch.Tensor, name: str, new_tokens: int
) -> None:
    with SESSIONS[name](case) as generate:
        tokens = generate(new_tokens)
    check_count(name, tokens, case, new_tokens)
    assert tokens.tolist() == greedy[:, :new_tokens].tolist()
    assert int(tokens.max()) < case.policy.vocab_size - SPECIAL_IDS


@pytest.fixture
def scheduled(case: GenerationCase, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of every step of continuous batching, as they come."""
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    sizes: list[int] = []
    schedule = FIFOScheduler.schedule_batch

    def noted(self: Any, *budgets: int) -> Any:
        result = schedule(self, *budgets)
        sizes.append(len(result[0] or ()))
        return result

    monkeypatch.setattr(FIFOScheduler, "schedule_batch", noted)
    return sizes


@pytest.mark.parametrize(
    "device_type,together",
    # On a CPU 3 + 8 x (2 + 1) blocks: 6 rollouts of 1,025 tokens and more read no more than 27 x 256 tokens.
    [("cpu", 6), ("cuda", 8)],
)
def test_how_many_rollouts_of_continuous_batching_decode_together(
    case: GenerationCase, scheduled: list[int], monkeypatch: pytest.MonkeyPatch, device_type: str, together: int
) -> None:
    """The cache that a GPU without flash-attn gets holds all of them, also after other prompts went through it."""
    sizes_of = continuous.cache_options
    monkeypatch.setattr(continuous, "cache_options", lambda case, _, flash: sizes_of(case, device_type, flash))
    large = GenerationCase.random(case.policy, 1024, 8, 4, 1)
    start = continuous._start

    def rehearsed(*arguments: Any) -> Any:
        manager = start(*arguments)
        continuous.rehearse(manager, large)
        assert max(scheduled) == together
        assert not any(cache.ledger.evict_cached_blocks() for cache in caches(manager))  # none is left of them
        scheduled.clear()
        return manager

    def caches(manager: Any) -> list[Any]:
        return list(manager.batch_processor.cache.cache_allocators.values())

    monkeypatch.setattr(continuous, "_start", rehearsed)
    with SESSIONS[CONTINUOUS](large) as generate:
        tokens = generate(4)
    assert max(scheduled) == together
    with SESSIONS["ours"](large) as generate:
        check_tokens(large, {"ours": generate(4), CONTINUOUS: tokens})


@pytest.mark.parametrize("prefix,most", [(252, 2), (253, 4), (764, 4), (765, 6)])
def test_flash_attention_gets_an_even_number_of_blocks_for_a_request(
    case: GenerationCase, prefix: int, most: int
) -> None:
    """One more than ``prefix + new tokens`` fill, rounded up, as transformers does where it is told the lengths."""
    point = GenerationCase.random(case.policy, prefix, 8, 4, 1)
    blocks = continuous.blocks_needed(prefix, 8, 4, 1)
    expected = {"safety_margin": 0.0, "num_blocks": blocks, "max_blocks_per_request": most}
    assert continuous.cache_options(point, "cuda", flash=True) == expected


def test_a_session_that_is_left_with_an_error_computes_no_more(
    case: GenerationCase, scheduled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = GenerationCase.random(case.policy, 40, 2, 1000, 1)
    start = continuous._start
    managers: list[Any] = []

    def kept(*arguments: Any) -> Any:
        managers.append(start(*arguments))
        return managers[0]

    monkeypatch.setattr(continuous, "_start", kept)

    def interrupted() -> None:
        with SESSIONS[CONTINUOUS](long):
            managers[0].add_requests(long.prompts.tolist(), max_new_tokens=1000)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(scheduled) < 500 and not managers[0].is_running()


def test_a_difference_names_its_first_position(case: GenerationCase, greedy: torch.Tensor) -> None:
    wrong = greedy.clone()
    wrong[3, 4:] = wrong[3, 4:] ^ 1
    assert equal_share(greedy, wrong) == pytest.approx(1 - 2 / 36)
    with pytest.raises(RuntimeError, match=r"token 4 of rollout 1 of group 1 is \d+ for ours and \d+ for other"):
        check_tokens(case, {"ours": greedy, "other": wrong})
    check_tokens(case, {"ours": greedy, "other": greedy.clone()})
    with pytest.raises(RuntimeError, match=r"shape \(6, 5\), \(6, 6\) were asked for"):
        check_count("other", greedy[:, :5], case, NEW_TOKENS)
    wrong[4, 5] = case.policy.vocab_size - 1
    with pytest.raises(RuntimeError, match="other chose an end or media token in rollout 4"):
        check_count("other", wrong, case, NEW_TOKENS)


def test_a_tie_is_no_difference(case: GenerationCase, greedy: torch.Tensor) -> None:
    other = greedy.clone()
    other[0, 2:] = torch.tensor([1, 2, 3, 4])
    chosen, head = int(greedy[0, 2]), case.model.lm_head.weight
    assert chosen != 1
    kept = head[1].detach().clone()
    with torch.no_grad():
        head[1] = head[chosen]
    try:
        check_tokens(case, {"ours": greedy, "other": other})
    finally:
        with torch.no_grad():
            head[1] = kept


class _Broken:
    """Cannot run with this model after so many sessions."""

    def __init__(self, sessions: int):
        self.sessions = sessions

    @contextmanager
    def session(self, case: GenerationCase) -> Iterator[Generate]:
        if self.sessions == 0:
            raise CannotRun("no such cache")
        self.sessions -= 1
        with SESSIONS["transformers-generate"](case) as generate:
            yield generate


@pytest.mark.parametrize("sessions", [0, 3], ids=["in the warm-up", "in the second timed run"])
def test_who_cannot_run_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch, sessions: int) -> None:
    monkeypatch.setattr(continuous, "session", _Broken(sessions).session)
    names = ("ours", "transformers-generate", CONTINUOUS)
    spec: dict[str, Any] = {
        "model": "small",
        "dtype": "fp32",
        "device": "cpu",
        "threads": 1,
        "repeats": 2,
        "memory": False,
        "prefix": 20,
        "generations": 2,
        "new_tokens": 3,
        "groups": 1,
        "case": RolloutRun.case,
        "contestants": {name: CONTESTANTS[name].run for name in names},
    }
    result = worker.measure(spec)
    assert result["failed"] == {CONTINUOUS: "no such cache"}
    assert list(result["contestants"]) == ["ours", "transformers-generate"]
    for entry in result["contestants"].values():
        assert len(entry["seconds"]) == len(entry["first_seconds"]) == 2 and entry["equal_tokens"] == 1.0


def test_a_transformers_that_cannot_free_what_a_rehearsal_left_is_left_out() -> None:
    """Of 5.17; any other error would end the measurement of all contestants."""
    with pytest.raises(CannotRun, match=r"transformers \d.* cannot be paused .*; install a later one"):
        continuous.rehearse(object(), None)  # type: ignore[arg-type]
