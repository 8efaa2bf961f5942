"""The rewarder: responses in, rewards out, a whole step at a time. And by it: whether a gold answer, given as the
response, earns the full reward (what does not would teach the wrong thing), and whether two gold answers are one."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from vlm_pg.answers.grading import CHECKERS, PREPARE, mathematics_call, mathematics_verdict
from vlm_pg.answers.pool import Call, CheckerPool, Outcome
from vlm_pg.answers.verdict import Verdict, shorten
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.rewards.functions import UserFunction, as_text, error_trace
from vlm_pg.rewards.judge import Judge
from vlm_pg.rewards.parts import (
    Response,
    format_reward,
    language_reward,
    length_reward,
    read_answer,
    repetition_reward,
    total_reward,
)
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import RewardBreakdown, Sample

BUILT_IN_PARTS = ("accuracy", "format", "length", "repetition", "language", "judge")
# What training adds to a reward under these names (``vlm_pg/training/groups.py``).
RESERVED_PARTS = ("temporal", "length_bonus", "overlong", "kl")


class Rewarder(AbstractContextManager["Rewarder"]):
    """Rewards of responses; a context manager, to be closed when no more come.

    It starts no process and opens no connection before the first response that needs one, and each process that uses
    it (a rank, a fork) gets a pool of its own. ``failures``: responses that got no value because of an error in a user
    function, by the function's name, in everything it scored, evaluations included; ``first_errors``: the message
    about the first of them, as ``warn`` was given it.

    Args:
        settings: weights, tolerances, functions, judge, checking processes.
        warn: shown one message for the first error of each user function, with its traceback and record.

    Raises:
        ConfigError: a function that cannot be found or called, a judge that cannot be reached, two parts of one name.
    """

    def __init__(self, settings: RewardSettings, warn: Callable[[str], None] = warnings.warn):
        self._settings, self._warn = settings, warn
        self._functions = [UserFunction(entry) for entry in settings.functions]
        names = (*BUILT_IN_PARTS, *RESERVED_PARTS)
        counts = Counter([*names, *(function.name for function in self._functions)])
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(
                f"reward.functions has {', '.join(twice)}, which another part of the reward is called, too. Names that "
                f"are taken are {', '.join(names)}. Give the function another name (reward.functions: name)."
            )
        self._judge = Judge(settings.judge) if settings.judge.weight != 0.0 else None
        self._pool: CheckerPool | None = None
        self._pool_owner = 0
        self._is_closed = False
        self.failures: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each part that is computed, in the order in which ``parts`` holds them."""
        settings = self._settings
        weights = {"accuracy": settings.accuracy_weight, "format": settings.format_weight}
        optional = {name: getattr(settings, name).weight for name in BUILT_IN_PARTS[2:]}
        weights |= {name: weight for name, weight in optional.items() if weight != 0.0}
        return weights | {function.name: function.settings.weight for function in self._functions}

    @property
    def pids(self) -> list[int]:
        """Process ids of the checking processes that are alive; empty before the first task."""
        return [] if self._pool is None else self._pool.pids

    def score(
        self, responses: Sequence[Response], should_stop: Callable[[], bool] | None = None
    ) -> list[RewardBreakdown]:
        """The rewards, in order.

        ``parts`` are unweighted. An answer that cannot be read is wrong (0.0); a gold answer that cannot be used, a
        check that was stopped and a part that failed have no value (None), and ``notes`` says why, by part. ``total``
        is the sum of weight times part, None if a part that counts has no value.

        ``should_stop`` is polled while the judge or the checking processes are waited for.

        Raises:
            RuntimeError: the rewarder is closed, or checking processes do not start.
            InterruptedError: ``should_stop`` returned True. The rewarder can be used again.
        """
        columns: dict[str, list[Verdict]] = {
            "accuracy": self._accuracies(responses, should_stop),
            "format": [Verdict(format_reward(response.text)) for response in responses],
        }
        settings = self._settings
        if settings.length.weight != 0.0:
            columns["length"] = [
                Verdict(None, "its tokens were not counted")
                if response.num_tokens is None
                else Verdict(length_reward(response.num_tokens, settings.length))
                for response in responses
            ]
        if settings.repetition.weight != 0.0:
            columns["repetition"] = [Verdict(repetition_reward(one.text, settings.repetition)) for one in responses]
        if settings.language.weight != 0.0:
            columns["language"] = [Verdict(language_reward(one.text, settings.language)) for one in responses]
        if self._judge is not None:
            columns["judge"] = self._judge.score(responses, should_stop) if responses else []
        columns |= {function.name: self._values(function, responses, should_stop) for function in self._functions}
        weights = self.weights
        return [
            _breakdown({name: column[index] for name, column in columns.items()}, weights)
            for index in range(len(responses))
        ]

    def accuracies(
        self, responses: Sequence[Response], should_stop: Callable[[], bool] | None = None
    ) -> list[float | None]:
        """Accuracy alone, for responses that do not train: without judge and functions.

        Raises:
            RuntimeError, InterruptedError: as ``score``.
        """
        return [_finite(verdict).value for verdict in self._accuracies(responses, should_stop)]

    def close(self) -> None:
        """End the checking processes. May be called twice."""
        self._is_closed = True
        if self._pool is not None and self._pool_owner == os.getpid():
            self._pool.close()
        self._pool = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accuracies(self, responses: Sequence[Response], should_stop: Callable[[], bool] | None) -> list[Verdict]:
        if self._is_closed:
            raise RuntimeError("the rewarder is closed; nothing can be scored with it")
        answers = [read_answer(response.text, self._settings) for response in responses]
        pairs = [(response.sample, answer) for response, answer in zip(responses, answers, strict=True)]
        calls = [mathematics_call(one.answer, answer.text) for one, answer in pairs if one.answer_kind == "mathematics"]
        outcomes = iter(self._run(calls, should_stop))
        verdicts = []
        for sample, answer in pairs:
            if sample.answer_kind == "mathematics":
                verdict = mathematics_verdict(next(outcomes))
            else:
                verdict = CHECKERS[sample.answer_kind](answer.text, sample, self._settings)
            verdicts.append(answer.judged(verdict))
        return verdicts

    def _values(
        self, function: UserFunction, responses: Sequence[Response], should_stop: Callable[[], bool] | None
    ) -> list[Verdict]:
        """A user function's values; its errors are shown once, counted, and no value."""
        if not responses:
            return []
        results: Sequence[Verdict | Exception]
        if function.settings.isolated:
            outcomes = self._run([function.isolated_call(response) for response in responses], should_stop)
            results = [function.isolated_verdict(outcome) for outcome in outcomes]
        else:
            results = function(responses)
        verdicts = []
        for response, result in zip(responses, results, strict=True):
            if isinstance(result, Exception):
                self._report(function, response.sample, result)
                result = Verdict(None, f"{type(result).__name__}: {as_text(result)[:300]}")
            verdicts.append(result)
        return verdicts

    def _report(self, function: UserFunction, sample: Sample, error: Exception) -> None:
        self.failures[function.name] += 1
        if self.failures[function.name] == 1:
            message = self.first_errors[function.name] = (
                f"The reward function '{function.name}' ({function.settings.function}) failed on sample "
                f"{sample.sample_id} of {sample.source} (question {shorten(sample.question)}, answer "
                f"{shorten(sample.answer)}). The response has no value in this part; further failures of this function "
                f"are counted, not shown.\n{error_trace(error)}"
            )
            self._warn(message)

    def _run(self, calls: Sequence[Call], should_stop: Callable[[], bool] | None) -> list[Outcome]:
        """In the checking processes, which start with the first call and belong to the process that made it."""
        if not calls:
            return []
        if self._pool is None or self._pool_owner != os.getpid():
            isolated = [function.preload_call() for function in self._functions if function.settings.isolated]
            self._pool = CheckerPool(self._settings.checker, [PREPARE, *isolated], self._warn)
            self._pool_owner = os.getpid()
        return self._pool.run(calls, should_stop)


def score(sample: Sample, text: str, settings: RewardSettings) -> RewardBreakdown:
    """Reward of one response. For many, one ``Rewarder`` is faster: this one starts and ends what it needs."""
    with Rewarder(settings) as rewarder:
        return rewarder.score([Response(sample, text)])[0]


def _breakdown(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> RewardBreakdown:
    verdicts = {name: _finite(verdict) for name, verdict in verdicts.items()}
    parts = {name: verdict.value for name, verdict in verdicts.items()}
    notes = {name: verdict.note for name, verdict in verdicts.items() if verdict.note}
    total = total_reward(parts, weights)
    if total is not None and not math.isfinite(total):
        total, notes["total"] = None, f"the parts add up to {total}"
    return RewardBreakdown(total, parts, notes)


def _finite(verdict: Verdict) -> Verdict:
    """No value where a checker came out with nan or an infinity: one of them would spoil the whole step."""
    if verdict.value is None or math.isfinite(verdict.value):
        return verdict
    return Verdict(None, f"it came out as {verdict.value}, which is no number to train on")


_CHECKED_AT_A_TIME = 256


def gold_settings(settings: RewardSettings) -> RewardSettings:
    """The parts of a reward that read the answer: accuracy, format and the user's functions. The others are off: shape
    of a response, which a gold answer does not have, and the judge, which would get a request for every record."""
    default = RewardSettings()
    off = {name: getattr(default, name) for name in ("judge", "length", "repetition", "language")}
    return settings.model_copy(update=off)


def gold_faults(
    samples: Sequence[Sample], rewarder: Rewarder | None = None, num_tokens: Callable[[str], int] | None = None
) -> Iterator[SampleError | None]:
    """For each sample None, or why its own gold answer does not earn the full reward. None for one without.

    Accuracy and format must be 1; where accuracy has no weight, the user's functions say what is right, and those of
    positive weight must give 1 instead. Where it has one they must give a value. The reason is
    ``unscorable_gold_answer``.

    Args:
        samples: the questions.
        rewarder: of ``gold_settings``; default: of the default settings.
        num_tokens: counts a response's tokens, for functions that ask for that.
    """
    with Rewarder(RewardSettings()) if rewarder is None else nullcontext(rewarder) as rewarder:
        weights = rewarder.weights
        full = {name for name in weights if _must(name, weights)}
        counting = [name for name, weight in weights.items() if weight != 0.0]
        for start in range(0, len(samples), _CHECKED_AT_A_TIME):
            chunk = samples[start : start + _CHECKED_AT_A_TIME]
            responses = [_answered(one, one.answer, num_tokens) for one in chunk if one.answer]
            breakdowns = iter(rewarder.score(responses) if responses else [])
            for sample in chunk:
                yield _gold_fault(sample, next(breakdowns), full, counting) if sample.answer else None


def same_gold(
    first: Sample, second: Sample, rewarder: Rewarder, num_tokens: Callable[[str], int] | None = None
) -> bool:
    """Whether the gold answers of two samples of one question are one: each earns the full reward from the other, or
    one of the samples has none.

    What must be 1 is as of ``gold_faults``, or accuracy, where no part of the reward that counts reads answers.

    Args:
        rewarder, num_tokens: as of ``gold_faults``.
    """
    if not (first.answer and second.answer) or (first.answer_kind, first.answer) == (second.answer_kind, second.answer):
        return True
    crossed = [_answered(first, second.answer, num_tokens), _answered(second, first.answer, num_tokens)]
    reading = {name for name in rewarder.weights if name != "format" and _must(name, rewarder.weights)}
    return all(one.parts[name] == 1.0 for one in rewarder.score(crossed) for name in reading or {"accuracy"})


def _answered(sample: Sample, answer: str, num_tokens: Callable[[str], int] | None) -> Response:
    text = f"<think>gold</think><answer>{answer}</answer>"
    return Response(sample, text, None if num_tokens is None else num_tokens(text))


def _must(name: str, weights: dict[str, float]) -> bool:
    """Whether a part must be 1 of a gold answer."""
    if name == "format":
        return True
    return weights["accuracy"] != 0.0 if name == "accuracy" else weights["accuracy"] == 0.0 and weights[name] > 0.0


def _gold_fault(
    sample: Sample, breakdown: RewardBreakdown, full: set[str], counting: Sequence[str]
) -> SampleError | None:
    parts = breakdown.parts
    if all(parts[name] == 1.0 for name in full) and all(parts[name] is not None for name in counting):
        return None
    came = ", ".join(f"{name} {value}" for name, value in breakdown.parts.items())
    notes = "; ".join(note for name, note in breakdown.notes.items() if name != "total")
    return SampleError(
        "unscorable_gold_answer",
        f"the gold answer '{sample.answer[:80]}' to a {sample.answer_kind} question earns {came}"
        f"{f' ({notes})' if notes else ''}. It must earn the full reward, 1.0 each"
        f"{'' if full == set(breakdown.parts) else ' of ' + ' and '.join(sorted(full))}. Correct 'solution' or "
        "'problem_type', or remove the record.",
    )
