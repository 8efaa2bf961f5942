"""The judge as ``vlm-pg score`` is given it."""

from __future__ import annotations

from pydantic import ValidationError

from vlm_pg.errors import ConfigError
from vlm_pg.eval.judging.settings import EvalJudgeSettings


def judge_of(url: str | None, model: str | None, key_variable: str | None) -> EvalJudgeSettings:
    """The settings of a judge by its command-line arguments; without a URL, none.

    Raises:
        ConfigError: an argument is none that can be used, or comes without the URL.
    """
    if url is None and (model is not None or key_variable is not None):
        raise ConfigError("--judge-model and --judge-key-variable are about a judge. Name it with --judge URL.")
    given = {"url": url, "model": model, "api_key_variable": key_variable}
    try:
        return EvalJudgeSettings(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--judge: {first['loc'][0]} {first['msg'].removeprefix('Value error, ')}") from None
