"""Whether a gold answer, given as the response, earns the full reward: what does not would teach the wrong thing. And
whether two gold answers are one, by the same reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from vlm_pg.errors import SampleError
from vlm_pg.rewards.parts import Response
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import RewardBreakdown, Sample

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
    """For each sample None, or why its own gold answer does not earn the full reward.

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
            responses = [_answered(one, one.answer, num_tokens) for one in chunk]
            for sample, breakdown in zip(chunk, rewarder.score(responses), strict=True):
                yield _gold_fault(sample, breakdown, full, counting)


def same_gold(
    first: Sample, second: Sample, rewarder: Rewarder, num_tokens: Callable[[str], int] | None = None
) -> bool:
    """Whether the gold answers of two samples of one question are one: each earns the full reward from the other.

    What must be 1 is as of ``gold_faults``, or accuracy, where no part of the reward that counts reads answers.

    Args:
        rewarder, num_tokens: as of ``gold_faults``.
    """
    if (first.answer_kind, first.answer) == (second.answer_kind, second.answer):
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
