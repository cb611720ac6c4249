"""An analysis with a known result that fails as its prompts specify: a row per letter, for any model.

Fields: ``"raises"`` (refused), ``"breaks"`` (another error), ``"kills_once"`` (a file: who sees it missing makes it, and dies).
"""

import os
import signal
from pathlib import Path

import pandas as pd

from kvlens import HookedKVTransformer, KVLensError
from kvlens.analyses import Analysis, Columns, Field, Option

COLUMNS = Columns(place=("int64", "from 0"), letter=("str", ""), layers=("int64", "of the model"))


def letters_of(
    model: HookedKVTransformer,
    prompt: str,
    raises: object,
    breaks: object,
    kills_once: str | None,
    *,
    upper: bool = False,
    times: int = 1,
) -> pd.DataFrame:
    if raises is not None:
        raise KVLensError("too long\nby far")
    if breaks is not None:
        raise ZeroDivisionError("a bug")
    if kills_once and not Path(kills_once).exists():
        Path(kills_once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    found = list(prompt.upper() if upper else prompt) * times
    return COLUMNS.frame({"place": range(len(found)), "letter": found, "layers": model.cfg.n_layers})


def _check_model(model: HookedKVTransformer) -> None:
    if model.cfg.attention != "linear":
        raise KVLensError("it is not linear")


LETTERS = Analysis(
    name="letters",
    summary="the letters of the prompt",
    function=letters_of,
    columns=COLUMNS,
    inputs={
        "prompt": Field("prompt"),
        "raises": Field("raises", required=False),
        "breaks": Field("breaks", required=False),
        "kills_once": Field("kills_once", required=False),
    },
    options={"upper": Option("in capitals"), "times": Option("how often")},
    check_model=_check_model,
)
