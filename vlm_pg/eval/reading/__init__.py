"""Reading whole outputs as a careful human would: published evaluation prompts ask for no answer tags.

``read_output`` sends each kind of answer to its reader.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.reading.thinking import Said, said_in
from vlm_pg.types import AnswerKind, Sample

# Kind of answer -> module and function of its reader, imported when the first such answer is read.
_READERS: dict[AnswerKind, tuple[str, str]] = {
    "multiple_choice": ("choice", "read_choice"),
    "multiple_select": ("choice", "read_choices"),
    "yes_no": ("yes_no", "read_yes_no"),
    "exact": ("text", "read_text"),
    "free_form": ("text", "read_text"),
    "ocr": ("text", "read_text"),
}
_NOTHING = Said("", None, False)


def read_output(sample: Sample, output: str, truncated: bool) -> Reading:
    """What ``output`` answers to ``sample`` and what that is worth; a ``Reader`` of the contract.

    Args:
        sample: the question, with its gold answer.
        output: what a model wrote, without special tokens.
        truncated: whether the length limit cut it off.

    Raises:
        ValueError: no reader reads such answers.
    """
    if sample.answer_kind not in _READERS:
        raise ValueError(
            f"answers of kind {sample.answer_kind!r} have no reader; those that have one: "
            f"{', '.join(sorted(_READERS))}. Correct 'problem_type' of the record."
        )
    module, name = _READERS[sample.answer_kind]
    reader: Callable[[Sample, Said], Reading] = getattr(import_module(f"{__name__}.{module}"), name)
    return reader(sample, said_in(output, truncated) or _NOTHING)
