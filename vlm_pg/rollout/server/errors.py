"""What goes wrong with a server."""

from __future__ import annotations

from vlm_pg.errors import VlmPgError


class ServerError(VlmPgError):
    """A server that is away, answers something else than asked for, or cannot do what the settings ask."""


class AnswerError(ServerError):
    """One answer that cannot be learned from. Asked again, the server may give another one."""
