"""The parts of the server engine that need no server: requests, answers, scoring, folders to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.groups import make_case, random_group, tiny_policy
from tests.support.tiny import tiny_tokenizer
from vlm_pg.errors import AnswerError, ServerError
from vlm_pg.rollout.contracts import Answer
from vlm_pg.rollout.sampling import StopStrings
from vlm_pg.rollout.scoring import PolicyScorer, passes
from vlm_pg.rollout.server.answers import AnswerReader, turn_token_ids
from vlm_pg.rollout.server.dialects import ServerInfo, check_settings, request_fields
from vlm_pg.rollout.settings import RolloutSettings

TINY = Path(__file__).parents[3] / "assets/tiny-qwen2_5-vl"
TOKENIZER = tiny_tokenizer()
END, IMAGE = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|image_pad|>"))


def read(raw: Any, stops: tuple[str, ...] = (), longest: int = 50) -> Answer:
    strings = StopStrings(TOKENIZER, stops) if stops else None
    turns = turn_token_ids(TOKENIZER, (END,))
    return AnswerReader(TOKENIZER, (END,), strings, longest, (IMAGE,), turns, len(TOKENIZER)).read(raw)


def choice(content: str | None, finish_reason: str = "stop", **extra: Any) -> dict[str, Any]:
    return {"finish_reason": finish_reason, "message": {"content": content}} | extra


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_neutral_settings_are_sent_where_servers_have_defaults_of_their_own() -> None:
    fields = request_fields("vllm", RolloutSettings(), (7, 9), (3,))
    assert fields["top_k"] == -1 and fields["min_p"] == 0.0 and fields["repetition_penalty"] == 1.0
    assert fields["stop_token_ids"] == [7, 9] and fields["logit_bias"] == {"3": -100} and fields["return_token_ids"]
    greedy = RolloutSettings(temperature=0.0)
    assert request_fields("sglang", greedy, (7,), ())["temperature"] == 0.0


def test_an_unknown_server_gets_extras_only_where_they_matter() -> None:
    plain = {"temperature", "top_p", "max_tokens", "logit_bias", "logprobs"}
    assert request_fields("openai", RolloutSettings(), (7,), (3,)).keys() == plain
    changed = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 1.5, "min_new_tokens": 2}
    settings = RolloutSettings(**changed)  # type: ignore[arg-type]
    fields = request_fields("openai", settings, (7, 9), (3,))
    expected = {("min_tokens" if name == "min_new_tokens" else name): value for name, value in changed.items()}
    assert {name: fields[name] for name in fields.keys() - plain} == expected
    assert settings.extras == changed and not RolloutSettings().extras


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("openai", {"stop_strings": ("x",)}, "does not say what ended a response"),
        ("openai", {"stop_token_ids": (7,)}, "does not say what ended a response"),
    ],
)
def test_settings_that_a_kind_of_server_cannot_follow_are_refused(
    kind: Any, setting: dict[str, Any], message: str
) -> None:
    settings = RolloutSettings(**setting)
    with pytest.raises(ServerError, match=message):
        check_settings(kind, settings)
    for able in ("vllm", "sglang"):
        check_settings(able, settings)
        assert request_fields(able, settings, (7,), ())["presence_penalty"] == setting.get("presence_penalty", 0.0)


def test_a_model_that_is_not_served_is_refused() -> None:
    info = ServerInfo("vllm", ("qwen", "other"))
    assert info.check_model(None) == "qwen" and info.check_model("other") == "other"
    with pytest.raises(ServerError, match="It lists: qwen, other"):
        info.check_model("llama")


def test_the_stop_token_is_in_the_response_once() -> None:
    for text in ("a b", "a b<|im_end|>"):
        answer = read(choice(text))
        assert (answer.token_ids, answer.text, answer.finish_reason) == ((*ids("a b"), END), "a b", "stop")
    answer = read(choice("a b", "length"))
    assert answer.token_ids == ids("a b") and answer.finish_reason == "length"
    # Some servers call a response "length" whose last allowed token is the stop token.
    assert read(choice("a b<|im_end|>", "length")).finish_reason == "stop"
    answer = read(choice("A</answer>"), ("</answer>",))
    assert (answer.token_ids, answer.text, answer.finish_reason) == (ids("A</answer>"), "A", "stop")


def test_token_ids_of_the_server_are_taken_as_they_are() -> None:
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "red"]
    assert tuple(letters) != ids("red")
    answer = read(choice("red", token_ids=[*letters, END]))
    assert answer.token_ids == (*letters, END) and answer.exact and answer.text == "red"


def test_a_text_of_too_many_tokens_is_cut() -> None:
    answer = read(choice("abcdef"), longest=2)
    assert len(answer.token_ids) == 2 and answer.num_read == len(ids("abcdef")) + 1
    assert answer.finish_reason == "length"


SAMPLED = (*ids("a b"), END)
STOP = "</answer>"
# Its last token goes on behind the stop string: "</", "answer", ">."
BEYOND = [*ids("A"), *ids("</answer>.")]
OTHER = "one of them is of another response"


@pytest.mark.parametrize(
    "given,message",
    [
        (choice("a", "tool_calls"), "finish_reason 'tool_calls'"),
        (choice("", "length"), "without tokens"),
        ({"finish_reason": "stop", "message": {"content": "a", "reasoning_content": "b"}}, "reasoning_content out of"),
        ({"finish_reason": "stop", "message": {"content": None, "refusal": "no"}}, "refusal out of"),
        ({"finish_reason": "stop"}, "message: Field required"),
        (choice(None), r"message\.content: .* valid string \(it has None\)"),
        ({"finish_reason": "stop", "text": "a b"}, "message: Field required"),
        (choice("a b", text="a b"), "text: Input should be ''"),
        (choice("a") | {"message": {"role": "model", "content": "a"}}, r"message\.role: Input should be 'assistant'"),
        (choice("a b", token_ids=[]), "token_ids is empty beside the text 'a b'"),
        (choice("a b", token_ids=list(ids("a b"))), "its token_ids end in none of the stop tokens"),
        (choice("a b", token_ids=[True, *SAMPLED[1:]]), r"token_ids\.0: .* valid integer \(it has True\)"),
        (choice("a b", token_ids=[*ids("c"), END]), OTHER),
        (choice("a b", token_ids=[10**6, END]), "beyond the model's vocabulary"),
        (choice("a<|im_end|>b"), rf"goes on behind the tokens \[{END}\], as its text is tokenized here"),
        (choice("a<|im_end|>b<|im_end|>", token_ids=[*ids("a"), END, *ids("b"), END]), "goes on behind the tokens"),
        (choice("a<|im_start|>user"), "or begin another turn"),
        (choice("a<|image_pad|>b"), rf"contains media tokens \[{IMAGE}\].*distinguish a token from text"),
        (None, "a choice does not fit: the whole"),
        *((choice("a", logprobs={"content": [{"token": "x", "logprob": value}]}), r"logprobs\.content\.0\.logprob: ")
          for value in (3.0, float("inf"), True, "-1")),
    ],
)  # fmt: skip
def test_a_response_that_was_not_sampled_so_is_refused(given: Any, message: str) -> None:
    with pytest.raises(AnswerError, match=f"(?s){message}"):
        read(given)


@pytest.mark.parametrize("content", ["A", "A</answer>", "A</answer>."], ids=["before", "behind", "whole"])
def test_a_text_may_be_cut_at_the_stop_string_that_its_ids_go_beyond(content: str) -> None:
    """vLLM cuts the text there, with include_stop_str_in_output behind it, and keeps the whole last token."""
    assert TOKENIZER.decode(BEYOND[-1:]) == ">."
    answer = read(choice(content, token_ids=BEYOND), (STOP, "never"))
    assert answer.token_ids == tuple(BEYOND) and answer.exact
    assert (answer.text, answer.finish_reason) == ("A", "stop")


@pytest.mark.parametrize(
    "given,stops,message",
    [
        (choice("A</answer", token_ids=BEYOND), STOP, OTHER),
        (choice("B", token_ids=BEYOND), STOP, OTHER),
        (choice("", token_ids=BEYOND), STOP, OTHER),
        (choice("A", "length", token_ids=BEYOND), STOP, OTHER),
        (choice("A", token_ids=BEYOND), "never", OTHER),
        # Completed by an earlier token.
        (choice("A</answer>", token_ids=[*BEYOND, *ids("more"), END]), STOP, OTHER),
        (choice("A</answer> more", token_ids=[*ids("A</answer>"), *ids(" more"), END]), STOP, "behind a stop string"),
    ],
)
def test_a_text_that_is_cut_elsewhere_is_of_another_response(given: Any, stops: str, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        read(given, (stops,))


def test_log_probabilities_are_those_of_the_tokens_or_none() -> None:
    entries = [{"token": TOKENIZER.decode([token]), "logprob": -0.5} for token in SAMPLED]
    given = {"content": entries}
    assert read(choice("a b", token_ids=list(SAMPLED), logprobs=given)).logprobs == (-0.5,) * len(SAMPLED)
    assert read(choice("a b<|im_end|>", logprobs=given)).logprobs == (-0.5,) * len(SAMPLED)
    assert read(choice("a b", logprobs={"content": entries[:1]})).logprobs is None
    others = {"content": [{"token": "x", "logprob": -0.5} for _ in SAMPLED]}
    assert read(choice("a b", logprobs=others)).logprobs is None
    # Those that are not known cost no answer; an empty text beside a message means nothing.
    numbers = (None, float("nan"), -3.4028235e38, float("-inf"), -(10**400))
    for change in (*({"logprob": number} for number in numbers), {"token": None}):
        unknown = {"content": [entries[0] | change, *entries[1:]]}
        answer = read(choice("a b", text="", token_ids=list(SAMPLED), logprobs=unknown))
        assert answer.token_ids == SAMPLED and answer.logprobs is None


def test_a_part_of_broken_characters_is_found_by_its_log_probabilities() -> None:
    """Replacement characters are not compared, for decoders make different numbers of them."""
    broken = [token for token in range(256) if "\ufffd" in TOKENIZER.decode([token])][:2]
    entries = {"content": [{"token": "x", "logprob": -0.5} for _ in (*broken, END)]}
    whole = choice("\ufffd\ufffd", token_ids=[*broken, END], logprobs=entries)
    assert read(whole).token_ids == (*broken, END)
    with pytest.raises(AnswerError, match=r"token_ids has 1 tokens, the log-probabilities beside them are of 3: ids"):
        read(whole | {"token_ids": [END]})


def test_passes_keep_to_the_budget_and_lose_nothing() -> None:
    policy = tiny_policy()
    groups = [
        random_group(policy, make_case(policy, kind, seed), [5, 9, 3, 7], seed)
        for seed, kind in enumerate(("text", "image", "video"))
    ]
    parts = list(passes(groups, 60))
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for part in parts:
        used = sum(group.prompt.num_tokens + sum(map(len, group.responses)) for _, group in part)
        assert used <= 60 or (len(part) == 1 and len(part[0][1].responses) == 1)
        for index, group in part:
            found[index] += [len(response) for response in group.responses]
    assert found == {index: [5, 9, 3, 7] for index in range(3)} and len(parts) > 1
    whole = policy.logprobs(groups, temperature=0.7)
    for ours, theirs in zip(PolicyScorer(policy, 60).score(groups, 0.7), whole, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert not a.requires_grad
            torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=1e-4)
    with pytest.raises(InterruptedError):
        PolicyScorer(policy, 60, should_stop=lambda: True).score(groups, 1.0)
