"""Comparisons by math-verify for published rules, made in a checking process with a deadline and a memory limit."""

from __future__ import annotations

import atexit
import os
import re
from typing import Any

from vlm_pg.answers.grading import PREPARE, mathematics_call
from vlm_pg.answers.mathematics import without_evaluation
from vlm_pg.answers.pool import Call, CheckerPool
from vlm_pg.answers.verdict import CheckerSettings

MAX_OUTPUT = 100_000  # characters of an output that is searched for mathematics
# On long runs of blanks math-verify's patterns take the square of their length.
_BLANKS = re.compile(r"(\s{20})\s+")

_pools: dict[int, CheckerPool] = {}  # by process: a fork starts a pool of its own


def same_mathematics(gold: str, answer: str) -> tuple[bool, str]:
    """Whether two mathematical answers are equal by this project's own comparison, and a note if none was made."""
    right, note = _ask(mathematics_call(gold, answer))
    return bool(right), note


def whole_outputs_agree(gold: str, output: str) -> tuple[bool, str]:
    """``verify(parse(output), parse(gold))`` of math-verify with its defaults, in which plain expressions other than
    numbers are not evaluated.
    """
    return _ask(Call(f"{__name__}:verify_defaults", (gold, _searched(output))))


def latex_of_output_agrees(gold: str, output: str) -> tuple[bool | None, str]:
    """Open-R1's comparison of the LaTeX in an output with that in a gold solution; None if the solution has none."""
    return _ask(Call(f"{__name__}:verify_latex", (gold, _searched(output))))


def verify_defaults(gold: str, output: str) -> tuple[bool, str]:
    """``whole_outputs_agree``, in the checking process."""
    from math_verify import parse, verify

    with without_evaluation():
        found, wanted = parse(output, parsing_timeout=None), parse(gold, parsing_timeout=None)
        return bool(verify(found, wanted, timeout_seconds=None)), ""


def verify_latex(gold: str, output: str) -> tuple[bool | None, str]:
    """``latex_of_output_agrees``, in the checking process."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    with without_evaluation():
        wanted = parse(gold, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
        if not wanted:
            return None, "the gold solution has no mathematics that can be read"
        normalization = NormalizationConfig(
            malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
        )
        configuration = LatexExtractionConfig(
            normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
        )
        found = parse(output, [configuration], extraction_mode="first_match", parsing_timeout=None)
        return bool(verify(found, wanted, timeout_seconds=None)), ""


def _searched(output: str) -> str:
    return _BLANKS.sub(r"\1", output[:MAX_OUTPUT])


def _ask(call: Call) -> tuple[Any, str]:
    outcome = _pool().run([call])[0]
    if outcome.problem:
        return False, f"not compared, and so wrong: {outcome.problem}"
    value, note = outcome.value
    return (value if value is None else bool(value)), note


def _pool() -> CheckerPool:
    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools[os.getpid()] = CheckerPool(CheckerSettings(workers=1), (PREPARE,))
        atexit.register(pool.close)
    return pool
