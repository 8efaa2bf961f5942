"""The parts of the server engine that need no server: requests, answers, scoring, folders to serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from tests.support.groups import make_case, random_group, tiny_policy
from tests.support.tiny import tiny_tokenizer
from vlm_pg.errors import AnswerError, ServerError
from vlm_pg.rollout.scoring import PolicyScorer, passes
from vlm_pg.rollout.server.answers import AnswerReader, turn_token_ids
from vlm_pg.rollout.server.dialects import ServerInfo, check_settings, media_fields, processors, request_fields
from vlm_pg.rollout.server.generator import served_folder
from vlm_pg.rollout.settings import RolloutSettings, ServerSettings
from vlm_pg.rollout.stopping import StopStrings

ROOT = Path(__file__).parents[3]
TOKENIZER = tiny_tokenizer()
END, IMAGE = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|image_pad|>"))


def reader(stop_strings: tuple[str, ...] = (), max_new_tokens: int = 50) -> AnswerReader:
    strings = StopStrings(TOKENIZER, stop_strings) if stop_strings else None
    return AnswerReader(TOKENIZER, (END,), strings, max_new_tokens, (IMAGE,), stop_texts=stop_strings)


def choice(content: str | None, finish_reason: str = "stop", **extra: Any) -> dict[str, Any]:
    return {"finish_reason": finish_reason, "message": {"content": content}} | extra


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_neutral_settings_are_sent_where_servers_have_defaults_of_their_own() -> None:
    fields = request_fields("vllm", RolloutSettings(), (7, 9), (3,))
    assert fields["top_k"] == -1 and fields["min_p"] == 0.0 and fields["repetition_penalty"] == 1.0
    assert fields["stop_token_ids"] == [7, 9] and fields["logit_bias"] == {"3": -100} and fields["return_token_ids"]
    config = json.loads(request_fields("transformers", RolloutSettings(), (7, 9), (3,))["generation_config"])
    assert config["do_sample"] and config["top_k"] == 0 and config["repetition_penalty"] == 1.0
    assert config["eos_token_id"] == [7, 9] and config["suppress_tokens"] == [3]


def test_a_models_own_generation_config_fills_no_gap() -> None:
    """As ``generate`` merges the two."""
    config = json.loads(request_fields("transformers", RolloutSettings(), (7, 9), (3,))["generation_config"])
    theirs = {
        "do_sample": True,
        "temperature": 0.1,
        "top_p": 0.001,
        "top_k": 1,
        "min_p": 0.5,
        "typical_p": 0.2,
        "epsilon_cutoff": 0.1,
        "eta_cutoff": 0.1,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 9,
        "min_length": 30,
        "num_beams": 2,
        "guidance_scale": 2.0,
    }
    merged = GenerationConfig(**config)
    merged.update(**theirs, defaults_only=True)
    neutral = GenerationConfig(**config).to_dict()
    assert {name: merged.to_dict()[name] for name in theirs} == {name: neutral[name] for name in theirs}
    assert (merged.min_p, merged.min_new_tokens, merged.typical_p, merged.num_beams) == (0.0, 0, 1.0, 1)


def test_an_unknown_server_gets_extras_only_where_they_matter() -> None:
    plain = {"temperature", "top_p", "max_tokens", "logit_bias"}
    assert request_fields("openai", RolloutSettings(), (7,), (3,)).keys() == plain
    settings = RolloutSettings(top_k=5, min_p=0.1, repetition_penalty=1.2, presence_penalty=1.5, min_new_tokens=2)
    fields = request_fields("openai", settings, (7, 9), (3,))
    assert {name: fields[name] for name in fields.keys() - plain} == {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 1.5,
        "min_tokens": 2,
    }
    changed = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "min_new_tokens")
    assert processors(settings) == list(changed) and processors(RolloutSettings()) == []


@pytest.mark.parametrize("setting", [{"stop_strings": ("x",)}, {"stop_token_ids": (7,)}])
def test_an_unknown_server_is_given_no_stops(setting: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="does not say what ended a response"):
        check_settings("openai", RolloutSettings(**setting))
    check_settings("vllm", RolloutSettings(**setting))


def test_a_presence_penalty_goes_to_servers_that_know_it() -> None:
    settings = RolloutSettings(presence_penalty=1.5)
    for kind in ("vllm", "sglang"):
        check_settings(kind, settings)
        assert request_fields(kind, settings, (7,), ())["presence_penalty"] == 1.5
        assert request_fields(kind, RolloutSettings(), (7,), ())["presence_penalty"] == 0.0
    with pytest.raises(ServerError, match=r"is 1\.5, and transformers has no such penalty\. Use vLLM"):
        check_settings("transformers", settings)


def test_greedy_is_greedy_everywhere() -> None:
    settings = RolloutSettings(temperature=0.0)
    assert request_fields("sglang", settings, (7,), ())["temperature"] == 0.0
    config = json.loads(request_fields("transformers", settings, (7,), ())["generation_config"])
    assert config["do_sample"] is False and "temperature" not in config


def test_transformers_serve_keeps_the_size_of_media() -> None:
    assert media_fields("transformers", True) == {"chat_template_kwargs": {"do_resize": False}}
    assert media_fields("transformers", False) == {}


def test_vllm_is_sent_no_media_arguments_which_it_refuses_by_default() -> None:
    assert media_fields("vllm", True) == {}


def test_what_transformers_serve_cannot_do_is_refused() -> None:
    with pytest.raises(ServerError, match="cannot apply stop strings"):
        check_settings("transformers", RolloutSettings(stop_strings=("x",)))
    with pytest.raises(ServerError, match=r"Leave rollout\.server\.model out"):
        check_settings("transformers", RolloutSettings(server=ServerSettings(model="m")))


def test_a_model_that_is_not_served_is_refused() -> None:
    info = ServerInfo("vllm", ("qwen", "other"))
    assert info.check_model(None) == "qwen" and info.check_model("other") == "other"
    with pytest.raises(ServerError, match="It lists: qwen, other"):
        info.check_model("llama")


def test_the_stop_token_is_in_the_response_once() -> None:
    hidden, shown = reader().read("s", choice("a b")), reader().read("s", choice("a b<|im_end|>"))
    assert hidden.token_ids == shown.token_ids == (*ids("a b"), END)
    assert hidden.text == shown.text == "a b" and hidden.finish_reason == "stop"


def test_a_response_at_its_limit_has_no_stop_token() -> None:
    answer = reader().read("s", choice("a b", "length"))
    assert answer.token_ids == ids("a b") and answer.finish_reason == "length"
    # Some servers call a response "length" whose last allowed token is the stop token.
    assert reader().read("s", choice("a b<|im_end|>", "length")).finish_reason == "stop"


def test_token_ids_of_the_server_are_taken_as_they_are() -> None:
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "red"]
    assert tuple(letters) != ids("red")
    answer = reader().read("s", choice("red", token_ids=[*letters, END]))
    assert answer.token_ids == (*letters, END) and answer.exact and answer.text == "red"


def test_a_stop_string_ends_a_response_without_a_stop_token() -> None:
    answer = reader(stop_strings=("</answer>",)).read("s", choice("A</answer>"))
    assert answer.token_ids == ids("A</answer>")
    assert answer.text == "A" and answer.finish_reason == "stop"


def test_a_text_of_too_many_tokens_is_cut() -> None:
    answer = reader(max_new_tokens=2).read("s", choice("abcdef"))
    assert len(answer.token_ids) == 2 and answer.num_read == len(ids("abcdef")) + 1
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "given,message",
    [
        (choice("a", "tool_calls"), "finish_reason 'tool_calls'"),
        (choice("", "length"), "without tokens"),
        ({"finish_reason": "stop", "message": {"content": "a", "reasoning_content": "b"}}, "reasoning_content out of"),
        ({"finish_reason": "stop", "message": {"content": None, "refusal": "no"}}, "refusal out of"),
        (
            {"finish_reason": "stop", "message": {"content": "a", "function_call": {"name": "f"}}},
            "function_call out of",
        ),
    ],
)
def test_answers_that_cannot_be_learned_from_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        reader().read("s", given)


SAID = (*ids("a b"), END)


@pytest.mark.parametrize(
    "given,message",
    [
        ({"finish_reason": "stop"}, "message: Field required"),
        (choice(None), r"message\.content: .* valid string \(it has None\)"),
        ({"finish_reason": "stop", "text": "a b"}, "message: Field required"),
        ({"finish_reason": "stop", "delta": {"content": "a b"}}, "message: Field required"),
        (choice("a b", text="a b"), "text: Input should be ''"),
        (
            choice("a b") | {"message": {"role": "model", "content": "a b"}},
            r"message\.role: Input should be 'assistant'",
        ),
        (choice("a b", token_ids=[]), "token_ids is empty beside the text 'a b'"),
        (choice("a b", token_ids=list(ids("a b"))), "its token_ids end in none of the stop tokens"),
        (choice("a b", token_ids=[True, *SAID[1:]]), r"token_ids\.0: .* valid integer \(it has True\)"),
        (choice("a b", token_ids=[*ids("c"), END]), "one of them is of another response"),
        (choice("a b", token_ids=[10**6, END]), "beyond the model's vocabulary"),
        (choice("a<|im_end|>b"), rf"goes on behind the tokens \[{END}\], as its text is tokenized here"),
        (choice("a<|im_end|>b<|im_end|>", token_ids=[*ids("a"), END, *ids("b"), END]), "goes on behind the tokens"),
        (choice("a<|im_start|>user"), "or begin another turn"),
        (choice("a<|image_pad|>b"), "tell a token from words that spell it"),
        (None, "a choice does not fit: the whole"),
    ],
)
def test_what_nobody_sampled_is_not_read(given: Any, message: str) -> None:
    turns = turn_token_ids(TOKENIZER, (END,))
    strict = AnswerReader(TOKENIZER, (END,), None, 50, (IMAGE,), turns, len(TOKENIZER))
    with pytest.raises(AnswerError, match=f"(?s)^Sample 's': .*{message}"):
        strict.read("s", given)


def test_a_response_does_not_go_on_behind_a_stop_string() -> None:
    behind = [*ids("A</answer>"), *ids(" more"), END]
    with pytest.raises(AnswerError, match="goes on behind a stop string"):
        reader(stop_strings=("</answer>",)).read("s", choice("A</answer> more", token_ids=behind))


def test_log_probabilities_are_those_of_the_tokens_or_none() -> None:
    said = {"content": [{"token": TOKENIZER.decode([token]), "logprob": -0.5} for token in SAID]}
    assert reader().read("s", choice("a b", token_ids=list(SAID), logprobs=said)).logprobs == (-0.5,) * len(SAID)
    assert reader().read("s", choice("a b<|im_end|>", logprobs=said)).logprobs == (-0.5,) * len(SAID)
    assert reader().read("s", choice("a b", logprobs={"content": said["content"][:1]})).logprobs is None
    other = {"content": [{"token": "x", "logprob": -0.5} for _ in SAID]}
    assert reader().read("s", choice("a b", logprobs=other)).logprobs is None


STOP = "</answer>"
# Its last token goes on behind the stop string: "</", "answer", ">."
BEYOND = [*ids("A"), *ids("</answer>.")]


@pytest.mark.parametrize("content", ["A", "A</answer>", "A</answer>."], ids=["before", "behind", "whole"])
def test_a_text_may_be_cut_at_the_stop_string_that_its_ids_go_beyond(content: str) -> None:
    """vLLM cuts the text there, with include_stop_str_in_output behind it, and keeps the whole last token."""
    assert TOKENIZER.decode(BEYOND[-1:]) == ">."
    answer = reader((STOP, "never")).read("s", choice(content, token_ids=BEYOND))
    assert answer.token_ids == tuple(BEYOND) and answer.exact
    assert (answer.text, answer.finish_reason) == ("A", "stop")


@pytest.mark.parametrize(
    "content,finish_reason,stops",
    [
        ("A</answer", "stop", (STOP,)),
        ("A</", "stop", (STOP,)),
        ("B", "stop", (STOP,)),
        ("", "stop", (STOP,)),
        ("A", "length", (STOP,)),
        ("A", "stop", ("never",)),
    ],
)
def test_a_text_that_is_cut_elsewhere_is_of_another_response(
    content: str, finish_reason: str, stops: tuple[str, ...]
) -> None:
    with pytest.raises(AnswerError, match="one of them is of another response"):
        reader(stops).read("s", choice(content, finish_reason, token_ids=BEYOND))


def test_a_stop_string_that_an_earlier_token_completed_excuses_no_cut() -> None:
    earlier = [*BEYOND, *ids("more"), END]
    with pytest.raises(AnswerError, match="one of them is of another response"):
        reader((STOP,)).read("s", choice("A</answer>", token_ids=earlier))


@pytest.mark.parametrize("entry", [{"logprob": None}, {"logprob": float("nan")}, {"logprob": -3.4028235e38},
                                   {"logprob": float("-inf")}, {"logprob": -(10**400)}, {"token": None}])  # fmt: skip
def test_log_probabilities_that_are_not_known_cost_no_answer(entry: dict[str, Any]) -> None:
    entries = [{"token": TOKENIZER.decode([token]), "logprob": -0.5} for token in SAID]
    entries[1] |= entry
    answer = reader().read("s", choice("a b", token_ids=list(SAID), logprobs={"content": entries}))
    assert answer.token_ids == SAID and answer.logprobs is None


@pytest.mark.parametrize("value", [3.0, float("inf"), True, "-1"])
def test_log_probabilities_that_are_none_are_refused(value: Any) -> None:
    entries = {"content": [{"token": "x", "logprob": value}] * len(SAID)}
    with pytest.raises(AnswerError, match=r"logprobs\.content\.0\.logprob: "):
        reader().read("s", choice("a b", token_ids=list(SAID), logprobs=entries))


def test_an_empty_text_beside_a_message_means_nothing() -> None:
    assert reader().read("s", choice("a b", text="", token_ids=list(SAID))).token_ids == SAID


def test_media_tokens_in_a_response_are_refused() -> None:
    with pytest.raises(ServerError, match=rf"Sample 's': a response contains media tokens \[{IMAGE}\]"):
        reader().read("s", choice("a<|image_pad|>b"))


def test_passes_keep_to_the_budget_and_lose_nothing() -> None:
    policy = tiny_policy()
    groups = [
        random_group(policy, make_case(policy, kind, seed), [5, 9, 3, 7], seed)
        for seed, kind in enumerate(("text", "image", "video"))
    ]
    parts = list(passes(groups, 60))
    lengths = {group: [len(response) for response in groups[group].responses] for group in range(3)}
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for part in parts:
        used = sum(group.prompt.num_tokens + sum(map(len, group.responses)) for _, group in part)
        assert used <= 60 or (len(part) == 1 and len(part[0][1].responses) == 1)
        for index, group in part:
            found[index] += [len(response) for response in group.responses]
    assert found == lengths and len(parts) > 1
    whole = policy.logprobs(groups, temperature=0.7)
    for ours, theirs in zip(PolicyScorer(policy, 60).score(groups, 0.7), whole, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert not a.requires_grad
            torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=1e-4)


def test_scoring_can_be_stopped() -> None:
    policy = tiny_policy()
    group = random_group(policy, make_case(policy, "text", 0), [3], 0)
    with pytest.raises(InterruptedError):
        PolicyScorer(policy, 60, should_stop=lambda: True).score([group], 1.0)


def test_a_served_folder_hands_back_every_word(tmp_path: Path) -> None:
    folder = served_folder(str(ROOT / "assets/tiny-qwen2_5-vl"), tmp_path / "served")
    assert (folder / "model.safetensors").resolve() == ROOT / "assets/tiny-qwen2_5-vl/model.safetensors"
    assert not (folder / "generation_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = " <think> a</think>\n<answer>B</answer> <tool_call>x</tool_call>\n<|im_end|>"
    for prefix in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"):
        parsed = tokenizer.parse_response(tokenizer(said)["input_ids"], tokenizer.response_template, prefix=prefix)
        assert parsed["content"] == said


def test_a_served_folder_is_named_by_its_content_and_replaces_the_last(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (checkpoint / name).write_text("{}")
    first = served_folder(str(checkpoint), tmp_path / "served")
    assert served_folder(str(checkpoint), tmp_path / "served") == first
    (checkpoint / "model.safetensors").write_text("{ }")
    second = served_folder(str(checkpoint), tmp_path / "served")
    assert second != first and second.is_dir() and not first.exists()


def test_a_part_of_broken_characters_is_told_by_its_log_probabilities() -> None:
    """Replacement characters are compared by nobody, for decoders make different numbers of them."""
    broken = [token for token in range(256) if "\ufffd" in TOKENIZER.decode([token])][:2]
    said = {"content": [{"token": "x", "logprob": -0.5} for _ in (*broken, END)]}
    whole = choice("\ufffd\ufffd", token_ids=[*broken, END], logprobs=said)
    assert reader().read("s", whole).token_ids == (*broken, END)
    with pytest.raises(AnswerError, match=r"token_ids has 1 tokens, the log-probabilities beside them are of 3: ids"):
        reader().read("s", whole | {"token_ids": [END]})
