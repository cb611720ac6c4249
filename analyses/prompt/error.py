"""How exactly a converted prompt replaces the prompt: the logits on a text, both ways, position by position (ICLCA sec. 4).

Old: the model reads [prompt; text]. New: the model reads the text alone, with the converted prompt attached as a bias.
The two are equal up to rounding, which is measured on the model's own forward pass: :mod:`kvlens.analyses.prompt.rounding`.
"""

import pandas as pd
import torch

from kvlens import KVBias, KVModel
from kvlens.checks import checked

from ..declaration import Columns, analysis
from ..sequences import PromptTokens, TextTokens, prompt_text_bias
from ..texts import token_texts
from .readings import Readings, check_readings, read_text
from .rounding import relative_error, rounding_error, rounding_limit

COLUMNS = Columns(
    position=("int64", "0 is the first token of the text"),
    token=("str", "the token at this position"),
    relative_error=("float64", "||new - old|| / ||old|| over the vocabulary"),
    squared_error=("float64", "||new - old||^2; with the next column it gives the error of any set of positions"),
    squared_norm=("float64", "||old||^2"),
    max_abs_error=("float64", "the largest difference of one logit"),
    argmax_agrees=("bool", "whether both predict the same next token"),
    rounding_error=(
        "float64",
        "relative error of the unconverted model's forward pass on these tokens, against float64; the same in every row",
    ),
    exact_to_rounding=(
        "bool",
        "whether the relative error over all positions is at most 4 times that (1e-12 in float64); the same in every row",
    ),
)


@analysis(COLUMNS, "how exactly a converted prompt replaces the prompt: the logits on a text, both ways, position by position")
@checked
@torch.no_grad()
def conversion_error(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    readings: Readings | None = None,
) -> pd.DataFrame:
    """Compare the logits on the text with the prompt in front and with the prompt converted.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it has been converted already; None converts it here.
        readings: of this text with the prompt and converted, if they have been read already; None reads it here.

    Returns:
        One row per position of the text, in order:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    if readings is None:
        readings = read_text(model, prompt, text, bias=bias, conditions=("with_prompt", "converted"))
    check_readings(readings, ("with_prompt", "converted"), len(text))
    old, new = readings["with_prompt"].logits, readings["converted"].logits
    difference, old64 = new.double() - old.double(), old.double()
    squared_error, squared_norm = difference.square().sum(dim=-1), old64.square().sum(dim=-1)
    rounding = rounding_error(model, prompt, text)
    return COLUMNS.frame(
        {
            "position": range(len(text)),
            "token": token_texts(model, text),
            "relative_error": (squared_error / squared_norm).sqrt(),
            "squared_error": squared_error,
            "squared_norm": squared_norm,
            "max_abs_error": difference.abs().amax(dim=-1),
            "argmax_agrees": new.argmax(dim=-1) == old.argmax(dim=-1),
            "rounding_error": rounding,
            "exact_to_rounding": relative_error(new.double(), old64) <= rounding_limit(model, rounding),
        }
    )
