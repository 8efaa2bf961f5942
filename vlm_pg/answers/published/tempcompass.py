"""TempCompass. ``details``: ``task`` ("multi-choice", "yes_no", "caption_matching", "captioning"); for caption matching
also ``question`` and ``answer`` as published ("...\\nSentence A: ...\\nSentence B: ...", "Sentence A: ...").
"""

from __future__ import annotations

from vlm_pg.answers.published.rule import Rule, chosen, letters_of, texts_of, unusable, video_r1
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_TO_JUDGE = Reading(None, 0.0, "no rule applies; the judge that would be asked is left out")
_NAMES = ("Sentence ", "Option ", "Caption ")


def _official(sample: Sample, output: str, cut_off: bool) -> Reading:
    return _read(sample, output.replace("</s>", "").strip())


def _lmms(sample: Sample, output: str, cut_off: bool) -> Reading:
    return _read(sample, output)


def _read(sample: Sample, output: str) -> Reading:
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
    taken, place = "", -1
    # Later comparisons have the last word, as published: lines, then texts, then names.
    for index, parts in enumerate(lines):
        if output == ": ".join(parts):
            taken, place = output, index
    for index, (_, text, *_rest) in enumerate(lines):
        if text == output or (") " in output and text == output.split(") ")[1]):
            taken, place = text, index
    for shorten in (False, True):
        for index, (name, *_rest) in enumerate(lines):
            known = _without_name(name) if shorten else name
            if known in (output, output.replace(".", "")):
                taken, place = known, index
    if place == -1:
        return _TO_JUDGE
    right = taken in (": ".join(gold), gold[0].split(":")[0], gold[1], gold[0].split()[1])
    letters = letters_of(sample)
    return Reading(letters[place] if place < len(letters) else ": ".join(lines[place]), float(right))


def _without_name(name: str) -> str:
    for known in _NAMES:
        name = name.replace(known, "")
    return name


RULES = (
    Rule(
        "tempcompass/official",
        _official,
        "the authors' rule without its judge (--disable_llm)",
        "llyx97/TempCompass, eval_multi-choice.py, eval_yes_no.py, eval_caption_matching.py",
        "Blanks and '</s>' are removed. '(B)' and 'B: ...' are read by the judge alone and wrong here; 'Nothing' and "
        "'Not sure' are no, 'Yes and no' is yes. Captioning, which only a judge scores, has no value.",
    ),
    Rule(
        "tempcompass/lmms",
        _lmms,
        "lmms-eval's rule without its judge",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/tempcompass/utils.py",
        "As the authors', but nothing is removed from the output, so that ' B' goes to the judge. Captioning has no "
        "value.",
    ),
    Rule(
        "tempcompass/video_r1",
        video_r1,
        "Video-R1's rule, for multi-choice alone",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output: '(B)' and 'B.' are wrong.",
    ),
)
