"""Reward functions of the user: found by name, called with what they ask for, held to what they may return."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsFloat

from vlm_pg.answers.pool import Call, Outcome
from vlm_pg.answers.verdict import Verdict
from vlm_pg.errors import ConfigError
from vlm_pg.functions import load_function
from vlm_pg.rewards.parts import Response
from vlm_pg.rewards.settings import FunctionSettings
from vlm_pg.types import MediaRef, Sample

_SETTING = "reward.functions"
# Parameter -> what it is of a response. The first four have a plural, under which a function gets a list of all.
_SINGULAR: dict[str, Callable[[Response], Any]] = {
    "response": lambda response: response.text,
    "question": lambda response: response.sample.question,
    "answer": lambda response: response.sample.answer,
    "sample": lambda response: response.sample,
}
# The same name in both: one response's options or number of tokens, or a list of all.
_EITHER: dict[str, Callable[[Response], Any]] = {
    "options": lambda response: response.sample.options,
    "num_tokens": lambda response: response.num_tokens,
}
_PLURAL = {f"{name}s": field for name, field in _SINGULAR.items()}
_ALLOWED = (
    f"Allowed are {', '.join(_SINGULAR)}, {', '.join(_EITHER)} and **kwargs, for one response a call, or "
    f"{', '.join(_PLURAL)}, {', '.join(_EITHER)}, for lists of all responses in one call."
)


class UserFunction:
    """One entry of ``reward.functions``.

    Args:
        settings: which function, its name and weight.

    Raises:
        ConfigError: it cannot be found or imported, or asks for parameters that there are not.
    """

    def __init__(self, settings: FunctionSettings):
        self.settings = settings
        self.function = load_function(settings.function, _SETTING)
        self.name = settings.name or settings.function.rpartition(":")[2]
        self._wanted, self._takes_all, self.is_batched = _parameters(self.function, settings.function)

    def __call__(self, responses: Sequence[Response]) -> list[Verdict | Exception]:
        """Of each response the function's value, "no value", or the error."""
        if self.is_batched:
            return self._call_once(responses)
        fields = _SINGULAR | _EITHER
        names = [name for name in fields if self._takes_all or name in self._wanted]
        results = self._results([{name: fields[name](response) for name in names} for response in responses])
        return [self._verdict(result) for result in results]

    def isolated_call(self, response: Response) -> Call:
        """The same for one response, as a task for the checking processes."""
        sample = dataclasses.asdict(response.sample)
        settings = self.settings.model_dump(mode="json")
        return Call(f"{__name__}:run_isolated", (settings, sample, response.text, response.num_tokens))

    def isolated_verdict(self, outcome: Outcome) -> Verdict | Exception:
        """What became of such a task. A task that was stopped says so in the note; an exception is one."""
        if outcome.trace:
            return FunctionError(outcome.problem, outcome.trace)
        if outcome.problem:
            return Verdict(None, f"stopped: {outcome.problem}")
        return Verdict(*outcome.value)

    def preload_call(self) -> Call:
        """Imports the function in a checking process, so that no response's deadline pays for it."""
        return Call(f"{__name__}:load_with_path", (self.settings.function, list(sys.path)))

    def _call_once(self, responses: Sequence[Response]) -> list[Verdict | Exception]:
        fields = _PLURAL | _EITHER
        arguments = {name: [fields[name](response) for response in responses] for name in self._wanted}
        result = self._results([arguments])[0]
        if isinstance(result, BaseException):
            return [_as_exception(result)] * len(responses)
        values = _attempt(list, result) if isinstance(result, Iterable) else None
        if isinstance(values, Exception):  # raised by a generator
            return [values] * len(responses)
        if values is None or isinstance(result, str) or len(values) != len(responses):
            came = type(result).__name__ if values is None else f"{type(result).__name__} of {len(values)}"
            error = FunctionError(
                f"it returned {came} for {len(responses)} responses. A function of lists returns a list with one "
                "number, or None for no value, per response."
            )
            return [error] * len(responses)
        return [self._verdict(value) for value in values]

    def _results(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        if inspect.iscoroutinefunction(self.function):
            return asyncio.run(_gathered(self.function, calls))
        return [_attempt(self.function, **arguments) for arguments in calls]

    def _verdict(self, result: Any) -> Verdict | Exception:
        if isinstance(result, BaseException):
            return _as_exception(result)
        if result is None:
            return Verdict(None, "the function returned None")
        value = _attempt(float, result) if isinstance(result, SupportsFloat) else math.nan
        # Refused by float: an array of several numbers, 10**400.
        if isinstance(value, Exception) or not math.isfinite(value):
            return FunctionError(
                f"it returned {as_text(result)[:80]!r} ({type(result).__name__}). A finite number, a bool, or None for "
                "no value is expected."
            )
        return Verdict(float(value))


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else FunctionError(f"it ended with {type(error).__name__}")


class FunctionError(Exception):
    """What a function did wrong, with the traceback where it raised."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message)
        self.trace = trace


def load_with_path(name: str, search_path: Sequence[str]) -> None:
    """``load_function`` with the trainer's module search path; for the checking processes."""
    sys.path.extend(entry for entry in search_path if entry not in sys.path)
    load_function(name, _SETTING)


def run_isolated(
    settings: dict[str, Any], sample: dict[str, Any], text: str, num_tokens: int | None
) -> tuple[float | None, str]:
    """One response, in a checking process: value and note.

    Raises:
        Exception: whatever the function raised, or what is wrong with what it returned.
    """
    media = tuple(MediaRef(**media | {"times": tuple(media["times"])}) for media in sample["media"])
    fields = sample | {"media": media, "options": tuple(sample["options"]), "turns": tuple(sample["turns"])}
    [verdict] = UserFunction(FunctionSettings(**settings))([Response(Sample(**fields), text, num_tokens)])
    if isinstance(verdict, Exception):
        raise verdict
    return verdict.value, verdict.note


def error_trace(error: Exception) -> str:
    """The traceback of an error of a function, wherever it ran."""
    if isinstance(error, FunctionError):
        return error.trace or as_text(error)
    return "".join(traceback.format_exception(error)).strip()


def as_text(value: object) -> str:
    """``str(value)``, whatever that raises: an int of 5000 digits does, and so may a user's class."""
    try:
        return str(value)
    except Exception as error:
        return f"<no text: {type(error).__name__}>"


def _parameters(function: Callable[..., Any], name: str) -> tuple[list[str], bool, bool]:
    """What a function asks for, whether it takes everything by **kwargs, and whether it takes lists."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"The function '{name}' of {_SETTING} does not say what its parameters are, as functions written in "
            f"C may not. {_ALLOWED} Write a function around it."
        ) from None
    known = _SINGULAR | _PLURAL | _EITHER
    wanted = [parameter.name for parameter in parameters if parameter.name in known]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    singular, plural = [key for key in wanted if key in _SINGULAR], [key for key in wanted if key in _PLURAL]
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_ONLY
        or (
            parameter.name not in known
            and parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        )
    ]
    fault = None
    if unknown:
        fault = f"asks for {', '.join(unknown)}, which there is not (or not by name)"
    elif plural and (singular or takes_all):
        fault = f"mixes {', '.join(plural)} with {', '.join(singular or ['**kwargs'])}"
    elif not (wanted or takes_all):
        fault = "asks for nothing of the response"
    if fault:
        raise ConfigError(f"The function '{name}' of {_SETTING} {fault}. {_ALLOWED} Change its parameters.")
    return wanted, takes_all, bool(plural)


def _attempt(function: Callable[..., Any], *values: Any, **arguments: Any) -> Any:
    try:
        return function(*values, **arguments)
    except Exception as error:
        return error
    except SystemExit as error:  # a function that ends the process would end the run
        return _exit_error(error)


async def _gathered(function: Callable[..., Any], calls: Sequence[dict[str, Any]]) -> list[Any]:
    async def attempt(arguments: dict[str, Any]) -> Any:
        try:
            return await function(**arguments)
        except SystemExit as error:  # would end the event loop, not this call alone
            return _exit_error(error)

    return await asyncio.gather(*map(attempt, calls), return_exceptions=True)


def _exit_error(error: SystemExit) -> FunctionError:
    return FunctionError(f"it called sys.exit({as_text(error.code)})", traceback.format_exc())
