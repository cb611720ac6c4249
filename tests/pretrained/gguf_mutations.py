"""Small changes of a GGUF file, by the part of its header that they change."""

import math
import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9


class Span(NamedTuple):
    """Bytes of one part: a count or length, the name or type of something, a shape or place, a value, a text, or padding."""

    part: str
    start: int
    stop: int
    form: str = ""


def spans(whole: bytes) -> Iterator[Span]:
    """Every part of the header, up to the first tensor."""
    at = 0

    def take(part: str, form: str) -> int | float:
        nonlocal at
        start, at = at, at + struct.calcsize(f"<{form}")
        found.append(Span(part, start, at, form))
        return struct.unpack_from(f"<{form}", whole, start)[0]

    def text(part: str) -> None:
        nonlocal at
        n = int(take("length", "Q"))
        found.append(Span(part, at, at + n))
        at += n

    def value(kind: int, where: str = "") -> None:
        if kind == STRING:
            text(f"text{where}")
        elif kind == ARRAY:
            inner = int(take("type", "I"))
            for _ in range(int(take("count", "Q"))):
                value(inner, " in an array")
        else:
            take(f"value{where}", SCALARS[kind])

    found: list[Span] = []
    take("magic", "I")
    take("version", "I")
    n_tensors, n_entries = int(take("count", "Q")), int(take("count", "Q"))
    for _ in range(n_entries):
        text("name")
        value(int(take("type", "I")))
    for _ in range(n_tensors):
        text("name")
        for _ in range(int(take("count", "I"))):
            take("shape", "Q")
        take("type", "I")
        take("place", "Q")
    found.append(Span("padding", at, at + -at % 32))
    return iter(found)


def mutated(whole: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A change of the header, and of which part."""
    found = [span for span in spans(whole) if span.stop > span.start]
    part = draw.choice(sorted({span.part for span in found} | {"bytes"}))
    if part == "bytes":
        return part, _cut_or_longer(whole, found[-1].stop, draw)
    span = draw.choice([span for span in found if span.part == part])
    if not span.form:
        at = draw.randrange(span.start, span.stop)
        return part, whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
    old = struct.unpack_from(f"<{span.form}", whole, span.start)[0]
    new = _other_number(old, span.form, draw)
    return part, whole[: span.start] + struct.pack(f"<{span.form}", new) + whole[span.stop :]


def _other_number(old: float, form: str, draw: random.Random) -> float:
    if form in "fd":
        return draw.choice([math.inf, -math.inf, math.nan, 1e30, -1.0])
    if form == "?":
        return not old
    bits = 8 * struct.calcsize(f"<{form}")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if form.islower() else (0, (1 << bits) - 1)
    others = {0, 1, old + 1, old - 1, 2 * old, old + 32, old - 32, high, low, 1 << bits - 2, draw.randint(low, high)} - {old}
    return draw.choice(sorted(number for number in others if low <= number <= high))


def _cut_or_longer(whole: bytes, stop: int, draw: random.Random) -> bytes:
    at, n = draw.randrange(stop), draw.randrange(1, 64)
    kept = draw.choice([at, at + n, len(whole)])  # the end is cut off, some bytes are left out, or more are put in
    return whole[:at] + (draw.randbytes(n) + whole[at:] if kept == len(whole) else b"" if kept == at else whole[kept:])
