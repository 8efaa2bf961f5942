"""The errors users see. Each message says what came, what is allowed, and what to do next."""

from __future__ import annotations


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


class SampleError(VlmPgError):
    """One sample is unusable. It is recorded with its reason and counted; the run goes on.

    Args:
        reason: short machine-readable code, the unit in which faults are counted, e.g. ``"missing_media"``.
        message: the sentence for people: what came, what is allowed, what to do.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class TooManyBadSamples(VlmPgError):
    """The stated share of bad samples was exceeded; the run stops rather than train on what is left."""
