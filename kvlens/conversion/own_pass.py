"""Converting a prompt for a model that reads prompts itself (:class:`~kvlens.model.protocol.ReadsPrompts`): the bridge."""

from typing import Any

from torch import Tensor

from kvlens.conversion.prompt import PromptTokens
from kvlens.conversion.softmax import ConversionMethod, Exact
from kvlens.conversion.softmax.prompt_pass import as_read, continued, every_key_kept, readers
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.model.protocol import KVModel, ReadsPrompts


def convert_by_own_pass(
    model: KVModel, prompt: PromptTokens, old: KVBias | None, fingerprint: Fingerprint, method: ConversionMethod, fwd_hooks: Any
) -> KVBias:
    """See :func:`kvlens.convert_prompt`, which checks the prompt and what it continues from."""
    if not isinstance(model, ReadsPrompts):
        raise KVLensError(f"convert_prompt: {type(model).__name__} has no read_prompt, which runs a prompt")
    if not isinstance(method, Exact):
        raise KVLensError(
            f'convert_prompt: method="{method.name}" needs the attention of a HookedKVTransformer; a '
            f'{type(model).__name__} supports only method="exact", which keeps every key'
        )
    read: dict[str, Tensor] = {}
    with model.hooks(fwd_hooks=list(fwd_hooks)), model.hooks(fwd_hooks=readers(model, old, read)):
        keys, values, recurrent = model.read_prompt(prompt.tokens, prompt.mask, prompt.keeps_positions)
    heads = {"k": keys.shape[2], "v": keys.shape[2], "q": fingerprint.n_heads}
    last = {x: values.new_zeros(*values.shape[:2], 0, n, values.shape[-1]) for x, n in heads.items()}
    new = every_key_kept(keys, values, prompt, old, fingerprint, last, recurrent)
    new.check_finite(f"convert_prompt: {model.cfg.architecture} in {model.cfg.dtype}")
    bias = continued(as_read(old, read), new)
    has_batch = prompt.has_batch or (old is not None and old.batch_size is not None)
    return bias if has_batch else bias.select_prompt(0)
