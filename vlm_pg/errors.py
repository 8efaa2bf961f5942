"""The errors users see. Each message names the value, the allowed values and the next action."""

from __future__ import annotations

import unicodedata

MESSAGE_LIMIT = 2000


def printable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """``text`` fit for a log: on one line, control characters and lone surrogates escaped, the middle of it left out
    beyond ``limit`` characters. Names and contents of files are shown through this.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) == "Zs":  # other spaces than ASCII's count as unprintable
        return char
    return char.encode("unicode_escape").decode()


class VlmPgError(ValueError):
    """Something the user can put right: a setting, a file, a model. Never a bug of ours."""


class ConfigError(VlmPgError):
    """A configuration that cannot be run: unknown key, value out of range, impossible combination."""


class ModelError(VlmPgError):
    """A model that is missing, unreadable, or of a kind that is not supported."""


class CheckpointError(VlmPgError):
    """A checkpoint that is missing, incomplete, or does not belong to this run."""


class GradientMismatchError(VlmPgError):
    """An engine applied another gradient than training computed."""


class NotFiniteError(VlmPgError, FloatingPointError):
    """A loss, a gradient or updated weights with NaN or infinities: the run ends before they are saved."""


class SampleError(VlmPgError):
    """One sample is unusable. It is recorded with its reason and counted; the run goes on.

    Args:
        reason: short machine-readable code, the unit in which faults are counted, e.g. ``"missing_media"``.
        message: the sentence for people: what came, what is allowed, what to do; made ``printable`` here.
        trace: traceback of an error that a decoder was not expected to raise; "" for all others.
    """

    def __init__(self, reason: str, message: str, trace: str = ""):
        super().__init__(printable(message))
        self.reason = reason
        self.trace = trace


class ServerError(VlmPgError):
    """A sampling server that is away, is of another kind than expected, or cannot do what the settings require."""


class AnswerError(ServerError):
    """One answer of a server that cannot be trained on; the same request may yield a valid one.

    Args:
        url: of the server.
    """

    def __init__(self, message: str, url: str = ""):
        super().__init__(message)
        self.url = url


class TooManyBadSamples(VlmPgError):
    """The stated share of bad samples was exceeded; the run stops rather than train on what is left."""


class RankLost(Exception):
    """Another rank has died or failed, so this one cannot continue; the rank has been logged."""


# Exit code of a process that ends because another rank is lost (EX_TEMPFAIL: the same command may succeed later).
EXIT_RANK_LOST = 75
