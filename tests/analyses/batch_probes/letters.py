"""An analysis whose answer is known by hand, and which fails as its prompts say: a row a letter, however the model looks.

Fields: ``"raises"`` (refused), ``"breaks"`` (another error), ``"kills_once"`` (a file: who sees it missing makes it, and dies).
"""

import os
import signal
from pathlib import Path

import pandas as pd

from analyses._analysis import Analysis, Option, Record
from kvlens import HookedKVTransformer, KVLensError


def _run(model: HookedKVTransformer, record: Record, *, upper: bool, times: int) -> pd.DataFrame:
    if "raises" in record.fields:
        raise KVLensError("too long\nby far")
    if "breaks" in record.fields:
        raise ZeroDivisionError("a bug")
    once = record.fields.get("kills_once")
    if once and not Path(once).exists():
        Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    letters = list(record.prompt.upper() if upper else record.prompt) * times
    return pd.DataFrame({"place": range(len(letters)), "letter": pd.Series(letters, dtype="str"), "layers": model.cfg.n_layers})


def _check_model(model: HookedKVTransformer) -> None:
    if model.cfg.attention != "linear":
        raise KVLensError("it is not linear")


ANALYSIS = Analysis(
    name="letters",
    summary="the letters of the prompt",
    columns={"place": "int64", "letter": "str", "layers": "int64"},
    run=_run,
    options={"upper": Option(False, "in capitals"), "times": Option(1, "how often")},
    check_model=_check_model,
)
