"""An analysis of a user's own, as CONTRIBUTING shows one: a batch of it was interrupted."""

import torch

from kvlens import HookedKVTransformer
from kvlens.analyses import TEXT, Analysis, Columns, Option

COLUMNS = Columns(position=("int64", "in the text, from 0"), entropy=("float64", "of the next token, nats"))


@COLUMNS.document
def entropies(model: HookedKVTransformer, text_tokens, *, temperature: float = 1.0):
    """How sure the model is at every position of a text.

    {columns}
    """
    with torch.no_grad():
        log_p = (model(text_tokens[None])[0] / temperature).log_softmax(dim=-1)
    return COLUMNS.frame({"position": range(len(text_tokens)), "entropy": -(log_p.exp() * log_p).sum(dim=-1)})


ENTROPIES = Analysis(
    name="entropies",
    summary="how sure the model is at every position of a text",
    function=entropies,
    columns=COLUMNS,
    inputs={"text_tokens": TEXT},
    options={"temperature": Option("what the logits are divided by")},
)
