"""Settings given as NAME=VALUE on the command line."""

import argparse
import json
from collections.abc import Iterable
from typing import Any

from kvlens.errors import KVLensError


def add_settings(command: argparse.ArgumentParser, flag: str, help: str) -> None:  # noqa: A002
    """Add an option that takes one or more NAME=VALUE, and may be repeated."""
    command.add_argument(flag, nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=help)


def settings_of(flag: str, pairs: Iterable[str]) -> dict[str, Any]:
    """``["steps=5", "kv_shift=true"]`` -> values parsed as JSON, or as strings if they are not JSON.

    Raises:
        KVLensError: something other than NAME=VALUE.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise KVLensError(f"{flag}: expected NAME=VALUE, got {pair!r}; other arguments come before {flag}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
