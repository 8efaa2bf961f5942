"""Bodies of answers, read piece by piece up to a limit: neither an endless nor a packed one fills the memory."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx2

# What a piece is unpacked to at a time.
PIECE_BYTES = 2**16
# zlib's window sizes: 47 reads a gzip or zlib header, -15 none.
_ANY_HEADER, _NO_HEADER = 47, -15
_PACKED = ("gzip", "x-gzip", "deflate")
_PLAIN = ("", "identity")
# Servers pack once, and a proxy before them perhaps again; each packing costs a call on the stack.
MOST_PACKINGS = 2
# What is asked for.
ACCEPTED = "gzip, deflate"


class UnreadableAnswer(httpx2.TransportError):
    """A body that is too long, or not what its header says; the server is there, and may do better."""


class BoundedBody(httpx2.AsyncByteStream):
    """The stream of an answer, unpacked, of at most ``limit_bytes``, which ``setting`` says.

    Raises, while it is read:
        UnreadableAnswer: it goes on beyond the limit, is packed in an unknown way or too many times, or damaged.
    """

    def __init__(self, stream: Any, encodings: str, limit_bytes: int, setting: str):
        self._stream, self._limit = stream, limit_bytes
        self._said = f" ({setting})" if setting else ""
        self._encodings = [name.strip().lower() for name in encodings.split(",")]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        packings = [name for name in reversed(self._encodings) if name not in _PLAIN]
        if len(packings) > MOST_PACKINGS:
            raise UnreadableAnswer(
                f"the answer is packed {len(packings)} times; at most {MOST_PACKINGS} are read, for {ACCEPTED} was "
                "asked for"
            )
        unpackers = [_Unpacker(name) for name in packings]
        received = unpacked = 0
        async for raw in self._stream:
            received += len(raw)
            for piece in _through(unpackers, raw):
                unpacked += len(piece)
                self._check_length(unpacked)
                yield piece
            self._check_length(received)
        for unpacker in unpackers:
            unpacker.check_ended()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _check_length(self, count: int) -> None:
        if count > self._limit:
            raise UnreadableAnswer(f"the answer has more than {self._limit / 2**20:g} MiB{self._said}")


def bound_body(response: httpx2.Response, limit_bytes: int, setting: str) -> None:
    """Let the body of ``response``, which has not been read yet, be read through ``BoundedBody``."""
    encodings = ",".join(response.headers.get_list("content-encoding"))
    response.stream = BoundedBody(response.stream, encodings, limit_bytes, setting)
    if "content-encoding" in response.headers:
        # httpx would unpack it a second time.
        del response.headers["content-encoding"]


def _through(unpackers: Sequence[_Unpacker], data: bytes) -> Iterator[bytes]:
    """What becomes of ``data`` behind all of them, in small pieces."""
    if not unpackers:
        yield data
        return
    first, *rest = unpackers
    while True:
        piece = first.unpack(data)
        if piece:
            yield from _through(rest, piece)
        data = first.left
        if not piece and not data:
            return


class _Unpacker:
    def __init__(self, encoding: str):
        if encoding not in _PACKED:
            raise UnreadableAnswer(f"the answer is packed as {encoding[:40]!r}; {ACCEPTED} was asked for")
        self._inner = zlib.decompressobj(_ANY_HEADER)
        self._may_lack_header = encoding == "deflate"
        self._begun = False

    def unpack(self, data: bytes) -> bytes:
        """At most ``PIECE_BYTES``; what is left of ``data`` is in ``left``."""
        try:
            piece = self._inner.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            if not self._may_lack_header or self._begun:
                raise UnreadableAnswer(f"the answer cannot be unpacked ({error})") from None
            self._inner = zlib.decompressobj(_NO_HEADER)
            self._may_lack_header = False
            return self.unpack(data)
        self._begun = self._begun or bool(data)
        return piece

    @property
    def left(self) -> bytes:
        """What has not been unpacked yet."""
        return self._inner.unconsumed_tail

    def check_ended(self) -> None:
        if self._begun and not self._inner.eof:
            raise UnreadableAnswer("the answer breaks off in the middle of what was packed")
