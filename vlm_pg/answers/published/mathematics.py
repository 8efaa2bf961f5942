"""CPPO's reading of GSM8K (``evaluate`` of ``src/open_r1/grpo_trainer_gsm.py`` and the functions it calls).
GSM8K, MATH-500, AMC 2023 and AIME: rules for final answers in words or LaTeX.

``details``: ``solution``, where a rule compares with that; without it the gold answer stands for it, boxed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vlm_pg.answers.published.checking import latex_of_output_agrees, same_mathematics
from vlm_pg.answers.published.qwen import is_right, read_answer, respelled
from vlm_pg.answers.published.rule import Rule, plain_number, short, unusable
from vlm_pg.answers.verdict import Reading
from vlm_pg.types import Sample

_SIGNED = re.compile(r"-?\d*\.?\d+")
_UNSIGNED = re.compile(r"\d+\.?\d*")
_DROPPED = str.maketrans("", "", "$%,")


def cppo_gsm8k(sample: Sample, output: str, cut_off: bool) -> Reading:
    """Right where the last answer tags, or without them the whole output, are the gold text, hold it as their only
    number, or hold it as their last number; of the last one the sign is lost.
    """
    gold = sample.answer.strip().replace(",", "")
    wanted = plain_number(gold)
    if wanted is None:
        return unusable(f"gold answer {sample.answer[:80]!r} is no number")
    tagged = _last_tagged(output)
    text = output if tagged is None else tagged
    if text == gold:
        return Reading(short(text), 1.0)
    numbers = _SIGNED.findall(text)
    if len(numbers) == 1 and float(numbers[0]) == wanted:
        return Reading(short(numbers[0]), 1.0)
    last = _last(text)
    if last is None:
        return Reading(None, 0.0, "there is no number")
    wanted_last = _last(gold)
    return Reading(short(last), float(wanted_last is not None and float(last) == float(wanted_last)))


def _last(text: str) -> str | None:
    numbers = _UNSIGNED.findall(text.translate(_DROPPED))
    return numbers[-1] if numbers else None


def _last_tagged(output: str) -> str | None:
    """What the last opening tag and the next closing one hold, without commas; None without both, or for "..."."""
    _, opening, rest = output.rpartition("<answer>")
    if not opening or "</answer>" not in rest:
        return None
    answer = rest.partition("</answer>")[0].strip().replace(",", "")
    return None if answer == "..." else answer


SETS = ("gsm8k", "math500", "amc", "aime")

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_ANSWER = re.compile(r"answer\s*+:\s*+", re.IGNORECASE)
_TAG_BLANKS = re.compile(r"(?<!\s)\s*+([<>/])\s*+")
_BOX = "\\boxed{"


def _qwen(sample: Sample, output: str, cut_off: bool) -> Reading:
    answer, gold = read_answer(output), respelled(sample.answer)
    right, note = is_right(answer, gold)
    if not gold:  # a unit, say, or a direction: equal is what nothing is left of as well
        note = "nothing is left of the gold answer by this rule"
    return Reading(short(answer), float(right), note)


def _gsm8k(pattern: re.Pattern[str], index: int) -> Callable[[Sample, str, bool], Reading]:
    def read(sample: Sample, output: str, cut_off: bool) -> Reading:
        found = pattern.findall(output)
        answer = found[index] if found else ""
        note = "" if found else "the rule reads no answer"
        return Reading(short(answer), float(bool(found) and _bare(answer) == _bare(sample.answer)), note)

    return read


def _bare(text: str) -> str:
    """Without commas, dollar signs, all up to "#### ", and a point at the end, as both sides are compared."""
    return text.replace(",", "").replace("$", "").rpartition("#### ")[2].removesuffix(".").lower()


def _lmms_aime(sample: Sample, output: str, cut_off: bool) -> Reading:
    """The last box, else all that follows the first "Answer:"; digits are compared as whole numbers."""
    for token, skips_line in (("<|im_start|>answer\n", False), ("<|im_start|>", True)):
        if token in output:
            output = output.rpartition(token)[2]
            output = output.split("\n", 1)[1] if skips_line and "\n" in output else output
            break
    if "\\boxed " in output:
        answer = output.rpartition("\\boxed ")[2].split("$")[0]
    else:
        boxed = _last_box(output)
        answer = _ANSWER.split(output, maxsplit=1)[-1] if boxed is None else boxed
    return Reading(short(answer), float(_whole(answer) == _whole(sample.answer)))


def _whole(text: str) -> str:
    return text.lstrip("0") or "0" if text.isascii() and text.isdigit() else text


def _last_box(output: str) -> str | None:
    """What the last box holds; None if there is none, or it is not closed."""
    start = output.rfind(_BOX)
    if start == -1:
        return None
    depth = 1
    for index in range(start + len(_BOX), len(output)):
        depth += {"{": 1, "}": -1}.get(output[index], 0)
        if depth == 0:
            return output[start + len(_BOX) : index]
    return None


def _easyr1(sample: Sample, output: str, cut_off: bool) -> Reading:
    boxed = _last_box(_TAG_BLANKS.sub(r"\1", output))
    if boxed is None:
        return Reading(None, 0.0, "there is no box")
    right, note = same_mathematics(sample.answer, boxed.strip())
    return Reading(short(boxed), float(right), note)


def _cppo(sample: Sample, output: str, cut_off: bool) -> Reading:
    solution = str(sample.details.get("solution") or f"$\\boxed{{{sample.answer}}}$")
    right, note = latex_of_output_agrees(solution, output)
    if right is None:
        return Reading(None, 1.0, f"{note}; the rule counts every output right")
    return Reading(short(_last_box(output) or ""), float(right), note)


def _for_each_set() -> list[Rule]:
    rules = []
    for name in SETS:
        rules += [
            Rule(
                f"{name}/qwen25_math",
                _qwen,
                "Qwen2.5-Math's rule",
                "QwenLM/Qwen2.5-Math, evaluation/parser.py and grader.py",
                "The last box, else behind 'the answer is', else the last number. A hundredth and the hundredfold of "
                "the gold number are right (0.27 for 27), and brackets are ignored ('[1,4]' for '[1,4)'). Expressions "
                "are compared by math-verify instead of latex2sympy and sympy's evaluating parser.",
            ),
            Rule(
                f"{name}/easyr1",
                _easyr1,
                "EasyR1's rule",
                "hiyouga/EasyR1, examples/reward_function/math.py",
                "The last box alone is read. It is compared by math-verify, not by mathruler, as there.",
            ),
        ]
        if name != "gsm8k":
            rules.append(
                Rule(
                    f"{name}/cppo",
                    _cppo,
                    "CPPO's rule, after Open-R1's",
                    "lzhxmu/CPPO, src/open_r1/rewards_math.py",
                    "Math-verify on the LaTeX of the whole output and of the solution. A solution that it cannot read "
                    "makes every output right.",
                )
            )
    return rules


RULES = (
    *_for_each_set(),
    Rule(
        "gsm8k/lmms_strict",
        _gsm8k(_STRICT, 0),
        "lmms-eval's strict-match, after lm-evaluation-harness",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/gsm8k/gsm8k.yaml",
        "The first '#### number' counts; a box is not read, and '18.00' is not 18.",
    ),
    Rule(
        "gsm8k/lmms_flexible",
        _gsm8k(_FLEXIBLE, -1),
        "lmms-eval's flexible-extract, after lm-evaluation-harness",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/gsm8k/gsm8k.yaml",
        "The last match of a number's signs counts, so that '$\\boxed{18}$.' reads '$.' and is wrong, as is '18.00'.",
    ),
    Rule(
        "gsm8k/cppo",
        cppo_gsm8k,
        "CPPO's rule for GSM8K",
        "lzhxmu/CPPO, src/open_r1/grpo_trainer_gsm.py",
        "The last answer tags, or else the whole output, must be the gold text, or hold it as their only or last "
        "number. The last number's sign is lost, so that '2 - 18' is 18.",
    ),
    Rule(
        "aime/lmms",
        _lmms_aime,
        "lmms-eval's rule without its judge",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/aime/utils.py",
        "The last box, else all behind the first 'Answer:', must be the gold text; digits are compared as whole "
        "numbers, so that 073 is 73. The judge that may normalise answers is not offered, nor lmms-eval's openai_math, "
        "which needs one.",
    ),
)
