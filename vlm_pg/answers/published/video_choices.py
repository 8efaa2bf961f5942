"""Video-MME, LongVideoBench, NExT-QA (multiple choice) and LongVideo-Reason."""

from __future__ import annotations

from vlm_pg.answers.published.checking import whole_outputs_agree
from vlm_pg.answers.published.rule import (
    Rule,
    chosen,
    drawn,
    first_of_five_or_drawn,
    first_of_four,
    ranked,
    short,
    texts_of,
    video_r1,
)
from vlm_pg.answers.published.video_mmmu import last_option_text, last_placed, letters_in, options_in, trimmed
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    """MMMU's parser: "(A)", else "A ", else "A.", else an option's text; of several the last; else one is drawn."""
    texts, text = texts_of(sample), trimmed(output)
    for form in ("({})", "{} ", "{}."):
        found = letters_in(text, (form,), list(texts))
        if found:
            return chosen(sample, last_placed(found, text, form if form == "({})" else " {} "))
    found = options_in(text, texts)
    if found:
        return chosen(sample, last_option_text(text, found, texts))
    return drawn("nextqa/lmms", sample, output)


_OPENING, _CLOSING = "<answer>", "</answer>"
_LEAD_IN = "Therefore the final answer is:"


def _long_rl(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The text of the first answer tags on one line, or the whole output, equals the gold answer.

    Math-verify, which that code asks first, reads no mathematics in a letter and so decides nothing there.
    """
    answer = _answer(output)
    right, note = answer == sample.answer.strip(), ""
    if not right and not (len(sample.answer.strip()) == 1 and sample.answer.strip().isalpha()):
        right, note = whole_outputs_agree(sample.answer, output)
    return Reading(short(answer), float(right), note)


def _answer(output: str) -> str:
    opening = f"{_OPENING}{_LEAD_IN} " if _LEAD_IN in output else _OPENING
    for line in output.split("\n"):
        _, found, rest = line.partition(opening)
        if found and _CLOSING in rest:
            return rest.partition(_CLOSING)[0].strip()
    return output.strip()


RULES = (
    Rule(
        "video_mme/official",
        first_of_four,
        "the authors' rule",
        "thanku-all/parse_answer; the same in BradyFU/Video-MME, evaluation/eval_your_results.py",
        "The first capital A to D anywhere, some lead-ins removed: 'A man ...' and 'Answer: B' are A, 'Based on ... "
        "the answer is A' is B. Outputs without one leave the denominator.",
    ),
    Rule(
        "video_mme/lmms",
        ranked,
        "lmms-eval's rule",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/_task_utils/mcq_extract.py",
        "Letters are ranked by form, the last in the text of one form: '(A) Vitamin C.' is C. Unread outputs are "
        "wrong. lmms-eval had the authors' rule before, and a more careful parser later.",
    ),
    Rule(
        "video_mme/video_r1",
        video_r1,
        "Video-R1's rule",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output: '(B)' and 'B.' are wrong. The rules of VLMEvalKit and "
        "Qwen3-VL, which ask a judge where none of theirs applies, are not offered.",
    ),
    Rule(
        "longvideobench/lmms",
        first_of_five_or_drawn,
        "lmms-eval's rule, by its own account the paper's",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/longvideobench/utils.py",
        "The first capital A to E anywhere, some lead-ins removed: 'Answer: B' is A. An output without one gets a "
        "random option; here it is drawn by a key, so that a figure repeats. VLMEvalKit's judge is not offered.",
    ),
    Rule(
        "nextqa/lmms",
        _lmms,
        "lmms-eval's rule for the multiple choice part",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/nextqa/utils.py, after MMMU's eval/eval_utils.py",
        "'A ' goes before 'C.', so that 'C. A cat' is A. An output without a letter gets a random option; here it is "
        "drawn by a key, so that a figure repeats. The open-ended part (WUPS, which needs WordNet) is not offered.",
    ),
    Rule(
        "longvideo_reason/long_rl",
        _long_rl,
        "the rule of Long-RL, the set's authors",
        "NVlabs/Long-RL, longvideo-reason/eval.py, accuracy_reward",
        "The first answer tags on one line, or the whole output, must equal the gold answer: '(B)' and 'B.' are wrong. "
        "Other golds than letters are also compared by math-verify on the whole output.",
    ),
)
