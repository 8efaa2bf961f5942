"""Video-MME, LongVideoBench, NExT-QA (multiple choice), LongVideo-Reason, MVBench and TempCompass."""

from __future__ import annotations

import re
from collections.abc import Callable

from vlm_pg.answers.published.checking import whole_outputs_agree
from vlm_pg.answers.published.rule import (
    Rule,
    accepted,
    chosen,
    drawn,
    first_of_five_or_drawn,
    first_of_four,
    letters_of,
    ranked,
    short,
    texts_of,
    unusable,
    video_r1_rule,
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


_MARKS = (";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!")
_GROUPED = re.compile(r"\d,\d")
_POINT = re.compile(r"\.(?!\d)")
# The published call passes re.UNICODE, which is 32, where the number of replacements is meant to stand.
_POINTS_REMOVED = 32
_LONE = re.compile(r"\b([A-E])\b", re.IGNORECASE)
_LABELLED = re.compile(r"([A-E])\.", re.IGNORECASE)


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    """``check_ans`` on the first line: the first word and "(b)", one within the other, points left out of the word."""
    return _accepting(sample, lambda letter, text: _first_word_fits(output.strip().split("\n")[0], letter))


def _kit(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The same on the whole output, in which moreover "(B) text" may stand anywhere."""
    return _accepting(
        sample, lambda letter, text: _first_word_fits(output.strip(), letter) or f"({letter}) {text}" in output
    )


def _accepting(sample: Sample, fits: Callable[[str, str], bool]) -> Reading:
    return accepted(sample, [letter for letter, text in texts_of(sample).items() if fits(letter, text)])


def _first_word_fits(output: str, letter: str) -> bool:
    word, option = output.lower().split(" ", 1)[0], f"({letter.lower()})"
    return word.replace(".", "") in option or option in word


def _lmms_mvbench(sample: Sample, output: str, cut_off: bool) -> Reading:
    texts = texts_of(sample)
    gold_text = texts.get(sample.answer)
    gold = next((letter for letter, text in texts.items() if text == gold_text), sample.answer)
    if output == "":
        return Reading(None, 0.0, "the rule leaves empty outputs out", counts=False)
    letter = _lone_letter(output)
    if gold != sample.answer:
        return Reading(letter or None, float(letter == gold), f"{gold}, of the same text, is taken for the gold answer")
    return chosen(sample, letter)


def _lone_letter(output: str) -> str:
    """A letter with a point at the start, before text on one line; else the first lone a to e in any case."""
    label = _LABELLED.match(output.strip())
    if label:
        text = output.strip()[label.end() :]
        before, _, last = text.rpartition("\n")
        if last and not before.strip():
            return label[1].upper()
    text = _without_marks(output.replace("\n", " ").replace("\t", " ").strip())
    found = _LONE.search(text.strip("'").strip('"').strip(")").strip("(").strip().lower())
    return found[1].upper() if found else ""


def _without_marks(text: str) -> str:
    """Marks beside a blank vanish, others become blanks; all vanish where a number such as 1,000 stands anywhere."""
    grouped = _GROUPED.search(text) is not None
    result = text
    for mark in _MARKS:
        beside_blank = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if beside_blank or grouped else " ")
    return _POINT.sub("", result, count=_POINTS_REMOVED)


_TO_JUDGE = Reading(None, 0.0, "no rule applies; the judge that would be asked is left out")


def _official_tempcompass(sample: Sample, output: str, cut_off: bool) -> Reading:
    return _lmms_tempcompass(sample, output.replace("</s>", "").strip(), cut_off)


def _lmms_tempcompass(sample: Sample, output: str, cut_off: bool) -> Reading:
    task = sample.details.get("task") or ("yes_no" if sample.answer_kind == "yes_no" else "multi-choice")
    if task == "multi-choice":
        return _choice(sample, output)
    if task == "yes_no":
        return _yes_no(sample, output)
    if task == "caption_matching":
        return _caption(sample, output)
    if task == "captioning":
        return unusable("captions are scored by a judge alone, which is not offered")
    return unusable(
        f"details['task'] is {str(task)[:80]!r}; multi-choice, yes_no, caption_matching or captioning is expected"
    )


def _choice(sample: Sample, output: str) -> Reading:
    """The option's whole line, or its letter alone, or the letter with "." or ")" at the start."""
    for letter, text in texts_of(sample).items():
        if output == f"{letter}. {text}":
            return chosen(sample, letter)
    if output in ("A", "B", "C", "D") or output[:2] in tuple(f"{letter}{mark}" for letter in "ABCD" for mark in ".)"):
        return chosen(sample, output[0])
    return _TO_JUDGE


def _yes_no(sample: Sample, output: str) -> Reading:
    for word in ("yes", "no"):
        if output.lower().startswith(word):
            return Reading(word, float(word == sample.answer))
    return _TO_JUDGE


def _caption(sample: Sample, output: str) -> Reading:
    """The option's whole line, its text, its name ("Sentence A") or its name's last part ("A")."""
    lines = [line.split(": ") for line in str(sample.details.get("question", "")).split("\n")[1:]]
    gold = str(sample.details.get("answer", "")).split(": ")
    if not lines or any(len(parts) < 2 for parts in [*lines, gold]) or len(gold[0].split()) < 2:
        return unusable("details lack the question or the answer as published, with options such as 'Sentence A: ...'")
    taken, option = "", -1
    # Later comparisons have the last word, as published: lines, then texts, then names.
    for index, parts in enumerate(lines):
        if output == ": ".join(parts):
            taken, option = output, index
    for index, (_, text, *_rest) in enumerate(lines):
        if text == output or (") " in output and text == output.split(") ")[1]):
            taken, option = text, index
    for shorten in (False, True):
        for index, (name, *_rest) in enumerate(lines):
            bare = name.replace("Sentence ", "").replace("Option ", "").replace("Caption ", "")
            known = bare if shorten else name
            if known in (output, output.replace(".", "")):
                taken, option = known, index
    if option == -1:
        return _TO_JUDGE
    right = taken in (": ".join(gold), gold[0].split(":")[0], gold[1], gold[0].split()[1])
    letters = letters_of(sample)
    return Reading(letters[option] if option < len(letters) else ": ".join(lines[option]), float(right))


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
    video_r1_rule(
        "video_mme",
        odd="'(B)' and 'B.' are wrong. The rules of VLMEvalKit and Qwen3-VL, which ask a judge where none of theirs "
        "applies, are not offered.",
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
    Rule(
        "mvbench/official",
        _official,
        "the authors' rule",
        "OpenGVLab/Ask-Anything, video_chat2/mvbench.ipynb, check_ans",
        "Right if the first word, without points, is part of '(b)', or '(b)' of the word: '' is right always, 'A man' "
        "is A, 'The answer is B' and '**B**' are wrong. The published code starts the answer itself with 'Best "
        "option:('.",
    ),
    Rule(
        "mvbench/kit",
        _kit,
        "VLMEvalKit's rule without its judge",
        "open-compass/VLMEvalKit, vlmeval/dataset/utils/mvbench.py, check_ans",
        "As the authors', on the whole output, and right as well where '(B) text of the option' stands in it. The "
        "judge that it may ask is not offered.",
    ),
    Rule(
        "mvbench/lmms",
        _lmms_mvbench,
        "lmms-eval's rule",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/mvbench/utils.py, mcq_acc",
        "The first lone letter a to e in any case: 'There is a man' is A. Empty outputs leave the denominator. Of "
        "equal options the first is the gold one.",
    ),
    video_r1_rule("mvbench"),
    Rule(
        "tempcompass/official",
        _official_tempcompass,
        "the authors' rule without its judge (--disable_llm)",
        "llyx97/TempCompass, eval_multi-choice.py, eval_yes_no.py, eval_caption_matching.py",
        "Blanks and '</s>' are removed. '(B)' and 'B: ...' are read by the judge alone and wrong here; 'Nothing' and "
        "'Not sure' are no, 'Yes and no' is yes. Captioning, which only a judge scores, has no value.",
    ),
    Rule(
        "tempcompass/lmms",
        _lmms_tempcompass,
        "lmms-eval's rule without its judge",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/tempcompass/utils.py",
        "As the authors', but nothing is removed from the output, so that ' B' goes to the judge. Captioning has no "
        "value.",
    ),
    video_r1_rule("tempcompass", whose="Video-R1's rule, for multi-choice alone"),
)
