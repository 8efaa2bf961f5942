"""The response that supervised training teaches: a record's own answer or conversation, behind its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vlm_pg.errors import SampleError
from vlm_pg.prompts.chat import control_tokens, render_chat
from vlm_pg.prompts.processor_outputs import is_tokenizer
from vlm_pg.types import Prompt, Rollout, Sample

# Stand-ins for turns in a rendered conversation: words that no chat template reads or changes.
_ASSISTANT, _USER = "the assistant's turn", "the user's turn"


class ResponseBuilder:
    """Tokens of responses as the model would have sampled them: the prompt's tokens are not touched by them.

    A conversation is one response: the assistant's turns, each up to its end token, and between them what the chat
    template writes around the user's turns when it asks for the next one, without loss.

    Args:
        processor: as of ``PromptBuilder``.
        longest: most tokens of a response (``rollout.max_new_tokens``).
    """

    def __init__(self, processor: Any, longest: int):
        self._processor, self._longest = processor, longest
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._control_tokens = control_tokens(processor)
        self._end = self._after_assistant([_USER, _ASSISTANT], False).rstrip() or str(self._tokenizer.eos_token)

    def build(self, sample: Sample, prompt: Prompt) -> Rollout:
        """The response of a sample's record.

        Args:
            prompt: of the sample; its text decides whether the response begins within a thought.

        Raises:
            SampleError: ``media_token_in_text``, ``no_thought`` (the prompt begins one, and the response has none), or
                ``response_too_long``.
        """
        first, *later = sample.turns or (sample.response,)
        for text in (first, *later):
            if token := next((token for token in self._control_tokens if token in text), None):
                raise SampleError(
                    "media_token_in_text",
                    f"a turn of the conversation or the answer contains the model's control token '{token}'. Control "
                    "tokens may come from the chat template only. Remove it from the record.",
                )
        pieces = [(_without_opened_thought(first, prompt.text) + self._end, True)]
        for user, assistant in zip(later[::2], later[1::2], strict=True):
            asked = self._after_assistant([_USER, _ASSISTANT, user], True)
            pieces += [(asked.removeprefix(self._end), False)]
            pieces += [(_without_opened_thought(assistant, asked) + self._end, True)]
        ids, mask = [], []
        for text, has_loss in pieces:
            of_piece = self._tokenizer(text, add_special_tokens=False).input_ids
            ids += of_piece
            mask += [has_loss] * len(of_piece)
        if len(ids) > self._longest:
            raise SampleError(
                "response_too_long",
                f"the response has {len(ids)} tokens. At most {self._longest} are allowed, and responses are never "
                "cut. Raise rollout.max_new_tokens, or leave the record out.",
            )
        token_ids, loss_mask = torch.tensor(ids), None if all(mask) else torch.tensor(mask)
        return Rollout(token_ids, torch.zeros(len(ids)), "stop", "\n".join((first, *later)), loss_mask=loss_mask)

    def pair(self, sample: Sample, prompt: Prompt) -> tuple[Rollout, Rollout]:
        """The chosen and the rejected response of a sample's record; see ``build``.

        Raises:
            SampleError: ``no_rejected_response`` too.
        """
        if not sample.rejected:
            raise SampleError(
                "no_rejected_response",
                "the record has no 'rejected' response. training.objective=dpo trains on pairs. Add one, or train on "
                "the record with training.objective=sft.",
            )
        return self.build(sample, prompt), self.build(replace(sample, turns=(sample.rejected,)), prompt)

    def _after_assistant(self, turns: Sequence[str], asks: bool) -> str:
        """What the chat template writes behind the assistant's last turn; ``asks``: for another one."""
        messages = []
        for number, text in enumerate(turns):
            content = text if is_tokenizer(self._processor) else [{"type": "text", "text": text}]
            messages.append({"role": "assistant" if number % 2 else "user", "content": content})
        return render_chat(self._processor, messages, add_generation_prompt=asks).partition(_ASSISTANT)[2]


def _without_opened_thought(text: str, asked: str) -> str:
    """The response behind ``asked``, which may have opened its thought already."""
    if not asked.rstrip().endswith("<think>"):
        return text
    thought = text.lstrip()
    if not thought.startswith("<think>"):
        raise SampleError(
            "no_thought",
            "the model's chat template begins responses with <think>, and this one has no thought. A 'process', or "
            "turns of the assistant that each begin with <think>, are expected. Add it, or train a model whose "
            "template does not.",
        )
    thought = thought.removeprefix("<think>")
    return thought.lstrip("\n") if asked.endswith("\n") else thought
