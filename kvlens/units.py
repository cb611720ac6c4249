from typing import NamedTuple
class Unit(NamedTuple):
    name: str
    text: str
    start: int
    stop: int
