"""All contestants generate the tokens of a plain greedy loop; a difference is an error unless it is a tie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vlm_pg.bench import rollout_case, worker
from vlm_pg.bench.case import SPECIAL_IDS, random_model, set_attention
from vlm_pg.bench.rollout import CONTESTANTS, ONE_BY_ONE, RolloutRun
from vlm_pg.bench.rollout_case import (
    Generate,
    GenerationCase,
    check_count,
    check_tokens,
    equal_share,
    never_choose_special_tokens,
)
from vlm_pg.bench.runner import CannotRun
from vlm_pg.models.loading import make_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.processes import resolve

PREFIX, GENERATIONS, NEW_TOKENS, GROUPS = 300, 2, 6, 3
SESSIONS = {name: resolve(entry.run) for name, entry in CONTESTANTS.items()}


@pytest.fixture(scope="module")
def case() -> GenerationCase:
    policy = make_policy(random_model("small"), None, ModelSettings(path="bench"))
    never_choose_special_tokens(policy)
    return GenerationCase.random(policy, PREFIX, GENERATIONS, NEW_TOKENS, GROUPS)


@pytest.fixture(scope="module")
def greedy(case: GenerationCase) -> torch.Tensor:
    """int64 [B*G, N]: the whole sequence read again for every token, no keys and values row."""
    set_attention(case, "sdpa")
    ids = case.prompts
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = case.model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, PREFIX:].repeat_interleave(GENERATIONS, dim=0)


@pytest.mark.parametrize("name", list(CONTESTANTS))
@pytest.mark.parametrize("new_tokens", [pytest.param(1, marks=pytest.mark.matrix), NEW_TOKENS])
def test_all_contestants_generate_the_same_tokens(
    case: GenerationCase, greedy: torch.Tensor, name: str, new_tokens: int
) -> None:
    with SESSIONS[name](case) as generate:
        tokens = generate(new_tokens)
    check_count(name, tokens, case, new_tokens)
    assert tokens.tolist() == greedy[:, :new_tokens].tolist()
    assert int(tokens.max()) < case.policy.vocab_size - SPECIAL_IDS


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
    row = head[1].detach().clone()
    with torch.no_grad():
        head[1] = head[chosen]
    try:
        check_tokens(case, {"ours": greedy, "other": other})
    finally:
        with torch.no_grad():
            head[1] = row


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
def test_a_contestant_that_cannot_run_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch, sessions: int) -> None:
    monkeypatch.setattr(rollout_case, "ours_one_by_one", _Broken(sessions).session)
    names = ("ours", "transformers-generate", ONE_BY_ONE)
    spec: dict[str, Any] = {"model": "small", "dtype": "fp32", "device": "cpu", "threads": 1, "repeats": 2}
    spec |= {"memory": False, "prefix": 20, "generations": 2, "new_tokens": 3, "groups": 1, "case": RolloutRun.case}
    spec["contestants"] = {name: CONTESTANTS[name].run for name in names}
    result = worker.measure(spec)
    assert result["failed"] == {ONE_BY_ONE: "no such cache"}
    assert list(result["contestants"]) == ["ours", "transformers-generate"]
    for entry in result["contestants"].values():
        assert len(entry["seconds"]) == len(entry["first_seconds"]) == 2 and entry["equal_tokens"] == 1.0
