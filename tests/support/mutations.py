"""Seeded damage: the same number gives the same file everywhere."""

from __future__ import annotations

import random
from collections.abc import Mapping

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def mutation(bases: Mapping[str, bytes], seed: int) -> tuple[str, bytes]:
    """Name of the base it was made of, and the damaged content."""
    random_ = random.Random(f"mutation/{seed}")
    name = random_.choice(sorted(bases))
    data = bytearray(bases[name])
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        if not data:
            break
        _damage(data, random_, bases)
    return name, bytes(data)


def damaged_payload(data: bytes, seed: str) -> bytes:
    """A clip with damage to its coded pictures: in ``mdat`` where there is one, else between head and tail."""
    random_ = random.Random(f"payload/{seed}")
    damaged, start, end = bytearray(data), 600, len(data) - 400
    if b"mdat" in data:
        head = data.index(b"mdat") - 4
        start, end = head + 8, head + int.from_bytes(data[head : head + 4], "big")
    for _ in range(random_.choice((1, 1, 2, 4, 8))):
        at, length = random_.randrange(start + 8, end - 64), random_.choice((4, 16, 64))
        match random_.randrange(3):
            case 0:
                damaged[at] ^= 1 << random_.randrange(8)
            case 1:
                damaged[at : at + length] = random_.randbytes(length)
            case 2:
                damaged[at : at + length] = bytes(length)
    return bytes(damaged)


_KINDS = ("flip", "flip", "overwrite", "extreme", "extreme", "cut", "remove", "repeat", "splice", "zero")


def _damage(data: bytearray, random_: random.Random, bases: Mapping[str, bytes]) -> None:
    kind = random_.choice(_KINDS)
    if kind == "splice":
        other = bases[random_.choice(sorted(bases))]
        tail = other[random_.randrange(len(other)) :]
    # Anywhere, but half of the time in the header.
    start = random_.randrange(min(len(data), 2048) if random_.random() < 0.5 else len(data))
    match kind:
        case "flip":
            data[start] ^= 1 << random_.randrange(8)
        case "overwrite":
            data[start : start + random_.choice((1, 2, 4, 64))] = random_.randbytes(random_.choice((1, 2, 4, 64)))
        case "extreme":
            order = random_.choice(("big", "little"))
            data[start : start + 4] = random_.choice(EXTREMES).to_bytes(4, order)  # type: ignore[arg-type]
        case "cut":
            del data[start:]
        case "remove":
            del data[start : start + random_.choice((1, 7, 188, 1000))]
        case "repeat":
            data[start:start] = data[start : start + random_.choice((1, 16, 188, 4000))] * random_.choice((1, 2, 50))
        case "splice":
            data[start:] = tail
        case "zero":
            length = random_.choice((4, 100, 5000))
            data[start : start + length] = bytes(len(data[start : start + length]))
