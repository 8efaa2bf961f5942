"""Seeded damage: the same number gives the same file everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def mutation(bases: Mapping[str, bytes], seed: int) -> tuple[str, bytes]:
    """Name of the base it was made of, and the damaged content."""
    random_ = random.Random(f"mutation/{seed}")
    name = random_.choice(sorted(bases))
    data = bytearray(bases[name])
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        if not data:
            break
        random_.choice(_KINDS)(data, random_, bases)
    return name, bytes(data)


def damaged_payload(data: bytes, seed: str) -> bytes:
    """A clip with damage to its coded pictures: in ``mdat`` where there is one, else between head and tail."""
    random_ = random.Random(f"payload/{seed}")
    damaged, start, end = bytearray(data), 600, len(data) - 400
    if b"mdat" in data:
        head = data.index(b"mdat") - 4
        start, end = head + 8, head + int.from_bytes(data[head : head + 4], "big")
    for _ in range(random_.choice((1, 1, 2, 4, 8))):
        offset, length = random_.randrange(start + 8, end - 64), random_.choice((4, 16, 64))
        match random_.randrange(3):
            case 0:
                damaged[offset] ^= 1 << random_.randrange(8)
            case 1:
                damaged[offset : offset + length] = random_.randbytes(length)
            case 2:
                damaged[offset : offset + length] = bytes(length)
    return bytes(damaged)


def _offset(data: bytearray, random_: random.Random) -> int:
    """Anywhere, but half of the time in the header."""
    return random_.randrange(min(len(data), 2048) if random_.random() < 0.5 else len(data))


def _flip(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    data[_offset(data, random_)] ^= 1 << random_.randrange(8)


def _overwrite(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    offset = _offset(data, random_)
    data[offset : offset + random_.choice((1, 2, 4, 64))] = random_.randbytes(random_.choice((1, 2, 4, 64)))


def _extreme(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    offset, order = _offset(data, random_), random_.choice(("big", "little"))
    data[offset : offset + 4] = random_.choice(EXTREMES).to_bytes(4, order)  # type: ignore[arg-type]


def _cut(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    del data[_offset(data, random_) :]


def _remove(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    offset = _offset(data, random_)
    del data[offset : offset + random_.choice((1, 7, 188, 1000))]


def _repeat(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    offset = _offset(data, random_)
    data[offset:offset] = data[offset : offset + random_.choice((1, 16, 188, 4000))] * random_.choice((1, 2, 50))


def _splice(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    other = bases[random_.choice(sorted(bases))]
    data[_offset(data, random_) :] = other[random_.randrange(len(other)) :]


def _zero(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    offset, length = _offset(data, random_), random_.choice((4, 100, 5000))
    data[offset : offset + length] = bytes(len(data[offset : offset + length]))


_KINDS: list[Callable[[bytearray, random.Random, Mapping[str, bytes]], None]] = [
    _flip, _flip, _overwrite, _extreme, _extreme, _cut, _remove, _repeat, _splice, _zero,
]  # fmt: skip
