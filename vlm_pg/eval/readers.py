"""Who reads the outputs of a set: ours, a published rule, the user's own, or training's reader of the answer block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vlm_pg.eval.contracts import Reader
from vlm_pg.eval.own import is_own, own_reader
from vlm_pg.eval.protocols.protocol import Protocol

if TYPE_CHECKING:
    from vlm_pg.answers.whole import WholeReader

Who = Literal["strict", "ours", "published"]
OURS = "ours"


def reader_name(chosen: Who | None, protocol: Protocol | None) -> str:
    """ "strict", "ours", or the name of the published rule or of the user's own reader that reads a set.

    Args:
        chosen: as ``eval.reader`` says; None: ours where there is a protocol, unless it names a reader of the user's
            own, else strict.
        protocol: the set's.
    """
    if protocol is None:
        return OURS if chosen == OURS else "strict"
    if chosen == "published" or (chosen is None and is_own(protocol.reader)):
        return protocol.reader
    return chosen or OURS


def reader_of(name: str, protocol: Protocol | None, whole: WholeReader) -> Reader | None:
    """The reader of that name, given what the protocol counts as the answer's beginning; None for "strict", which
    is the rewarder.

    Raises:
        ConfigError: there is no such published rule, or the user's own reader cannot be used.
    """
    if name == "strict":
        return None
    if name == OURS or is_own(name):
        reader = whole.read if name == OURS else own_reader(name)
    else:
        from vlm_pg.answers.published import published_rule  # the trainer reads by no published rule

        reader = published_rule(name)
    if protocol is None or not protocol.read_prefix:
        return reader
    return lambda sample, output, truncated: reader(sample, protocol.as_read(output), truncated)
