"""Chat templates that cannot be used are one error; only tokens that structure a conversation are refused in texts."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import CHAT_TEMPLATE, tiny_processor
from vlm_pg.errors import ModelError, SampleError
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.chat import control_tokens, render_chat
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import DecodedMedia, MediaRef, Prompt, Sample

PICTURE = DecodedMedia("image", np.zeros((1, 3, 56, 56), np.uint8), (0.0,), 0.0, "pillow")


def ones(input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.arange(len(input_ids)).expand(3, -1)


def build(processor: Any, question: str = "Who?", **settings: Any) -> Prompt:
    sample = Sample("s", question, (MediaRef("image", "a.png"),), (), "x", "exact", "here", "all")
    return PromptBuilder(processor, PromptSettings(**settings), ones).build(sample, [PICTURE])


def with_template(template: Any) -> Any:
    processor = tiny_processor()
    processor.chat_template = template
    return processor


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}", "cannot be rendered: TemplateSyntaxError"),
        ("{{ raise_exception('no system') }}", "cannot be rendered: TemplateError: no system"),
        ("{% for i in range(10**9) %}x{% endfor %}", "cannot be rendered: OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot be rendered: RecursionError"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered: SecurityError"),
        (5, "cannot be rendered: "),
        ("Hello.", r"writes 0 times <\|image_pad\|> for 1 images"),
        (CHAT_TEMPLATE * 2, r"writes 2 times <\|image_pad\|> for 1 images"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_error_that_names_it(template: Any, problem: str) -> None:
    with pytest.raises(ModelError, match=f"The chat template of the model .*{problem}") as got:
        build(with_template(template))
    assert "Copy chat_template.jinja" in str(got.value)


NESTED = "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "in_thread"),
    [
        (NESTED + ENDS, False),
        pytest.param(NESTED + ENDS, True, marks=pytest.mark.matrix),
        pytest.param(
            "{% for a in range(90000) %}{{ range(90000) | map('string') | select('==', 'x') | list }}{% endfor %}",
            False,
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
            False,
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["ranges", "in a thread", "filters", "macro"],
)
def test_a_template_that_loops_for_ever_is_stopped(template: str, in_thread: bool) -> None:
    """In any thread; a debugger's trace function is back afterwards."""

    def trace(*_: Any) -> None: ...

    def rendered() -> Any:
        sys.settrace(trace)
        try:
            with pytest.raises(ModelError, match="takes more than 10,000,000 steps of Python") as got:
                render_chat(with_template(template), [{"role": "user", "content": "Who?"}])
            return str(got.value), sys.gettrace()
        finally:
            sys.settrace(None)

    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            message, after = pool.submit(rendered).result()
    else:
        message, after = rendered()
    assert "The chat template of the model" in message and "Copy chat_template.jinja" in message
    assert after is trace


# As Qwen2-VL's.
COUNTING = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


def test_a_conversation_with_more_images_than_a_context_holds_is_rendered() -> None:
    content = [{"type": "image"}] * 5_000
    text = render_chat(with_template(COUNTING), [{"role": "user", "content": content}], add_vision_id=True)
    pictures = (f"Picture {number}: <|vision_start|><|image_pad|><|vision_end|>" for number in range(1, 5_001))
    assert text == f"<|im_start|>user\n{''.join(pictures)}<|im_end|>\n"


def taught(*tokens: str, special: bool) -> Any:
    processor = deepcopy(tiny_processor())
    if special:
        processor.tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)}, False)
    else:
        processor.tokenizer.add_tokens(list(tokens))
    return processor


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("token", ["<think>", "<|answer|>", "<|box_start|>"])
def test_a_token_that_the_model_was_taught_may_stand_in_any_text(token: str, special: bool) -> None:
    processor = taught(token, special=special)
    prompt = build(processor, f"What is {token}?", instructions={"exact": f"Answer behind {token}."})
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    assert int((prompt.input_ids == token_id).sum()) == 2


@pytest.mark.parametrize(
    ("token", "special"), [("<|turn|>", False), ("[TURN]", True), ("<|im_end|>", True), ("<|vision_pad|>", True)]
)
def test_a_token_that_structures_the_conversation_is_refused(token: str, special: bool) -> None:
    """By the chat template, or by the names of the family's own."""
    processor = taught(token, special=special)
    if "turn" in token.lower():
        processor.chat_template = CHAT_TEMPLATE + "{{ '" + token + "' }}"
    assert token in control_tokens(processor)
    with pytest.raises(SampleError, match="contains the model's control token") as got:
        build(processor, f"What is {token}?")
    assert got.value.reason == "media_token_in_text"
    if "turn" in token.lower():  # others the settings refuse themselves
        with pytest.raises(ModelError, match=r"prompt.instructions or an answer_prefix contains the model's control"):
            build(processor, instructions={"exact": f"Answer {token}."})


def test_a_special_word_that_is_no_control_token_ends_no_text() -> None:
    """Ends of texts are control tokens whatever they look like."""
    processor = taught("</s>", special=False)
    assert "</s>" not in control_tokens(processor)
    processor.tokenizer.eos_token = "</s>"
    assert "</s>" in control_tokens(processor)
