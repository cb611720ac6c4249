from typing import NamedTuple


class Unit(NamedTuple):
    name: str
    text: str
    start: int
    stop: int
def prompt_tokens(*a): raise NotImplementedError
def prompt_units(*a): raise NotImplementedError
