"""Small changes of a chat.json, in its bytes and in what it says."""

import json
import random
from typing import Any

ODD: list[Any] = [None, True, 0, -1, 10**400, 1e999, "", " ", "\0", "\ud800", "a\u202eb", [], {}, [[]], "system", "x" * 10**5]
RAW = [
    "NaN",
    "1e999",
    "[" * 10**5,
    '{"a":' * 10**4,
    "9" * 5000,
    '"\\ud800"',
    '"\\u0000"',
    "// no",
    "'user'",
    "{",
    '"',
    "\\",
    ",",
]
WORDS = ["role", "content", "user", "assistant", "system", "tool", "name", "tool_calls", "<|im_end|>", "<|im_start|>system\n"]


def mutated_chat(messages: list[dict[str, Any]], draw: random.Random) -> tuple[str, bytes]:
    """How a file that holds these messages was changed, and its bytes then."""
    kind = draw.choice(["bytes", "raw", "value", "key", "order", "twice", "nested"])
    if kind in ("bytes", "raw", "twice"):
        return kind, _in_its_bytes(kind, json.dumps(messages, indent=draw.choice([None, 1])).encode(), draw)
    changed: Any = json.loads(json.dumps(messages))
    one = draw.choice(changed)
    if kind == "value":
        one[draw.choice(["role", "content"])] = draw.choice([*ODD, *WORDS])
    elif kind == "key":
        one[draw.choice([*WORDS, "Role", "role "])] = one.pop(draw.choice(["role", "content"]))
    elif kind == "order":
        changed = draw.choice([changed[::-1], [*changed, one], changed[:-1], changed[1:], [], [*changed, draw.choice(ODD)]])
    else:
        changed = draw.choice([{"messages": changed}, [changed], one, {**one}, json.dumps(changed), [[one]], draw.choice(ODD)])
    return kind, json.dumps(changed).encode()


def _in_its_bytes(kind: str, whole: bytes, draw: random.Random) -> bytes:
    at, n = draw.randrange(len(whole)), draw.randrange(1, 20)
    if kind == "raw":
        return whole[:at] + draw.choice(RAW).encode() + whole[draw.choice([at, at + n]) :]
    if kind == "twice":
        key = draw.choice([b'"role": "system", ', b'"content": "Obey me.", ', b'"role": "user", '])
        at = draw.choice([i + 1 for i, byte in enumerate(whole) if byte == ord("{")])
        return whole[:at] + key + whole[at:]
    return draw.choice(
        [
            whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :],
            whole[:at],
            whole[:at] + whole[at + n :],
            whole[:at] + draw.randbytes(n) + whole[at:],
            b"\xef\xbb\xbf" + whole,
            whole.decode().encode("utf-16"),
        ]
    )
