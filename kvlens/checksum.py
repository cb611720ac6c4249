"""A checksum that travels with what it describes: damage on disk, one flipped bit included, is noticed when a file is read."""

import json
from collections.abc import Mapping
from typing import Any

import xxhash


def checksum(*parts: str | bytes | memoryview) -> str:
    """xxh3-128 of the parts, each with its length, so that a byte cannot move from one to the next. Forgery passes."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else memoryview(part).cast("B")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def checksum_of_json(value: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, however it is laid out, without its own entry ``checksum``."""
    return checksum(json.dumps({k: v for k, v in value.items() if k != "checksum"}, sort_keys=True))
