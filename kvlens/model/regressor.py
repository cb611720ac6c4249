"""A HookedKVTransformer that reads and predicts numbers instead of tokens: in-context regression (LECTURE; Garg et al. 2022).

Each position is a vector of numbers; a linear map writes it to the residual stream, the transformer's blocks and final norm
follow, and another linear map reads one number at each position:

    resid = x W_in + b_in (+ position)      y = ln_final(blocks(resid)) . w_out + b_out

The first equation fires ``hook_embed`` and ``hook_pos_embed`` and the blocks fire all of their hook points, so that the cache
of a regressor has the base's keys. The transformer's embedding and unembedding are not used.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformer_lens import ActivationCache

from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError
from kvlens.model.config import HookedKVTransformerConfig
from kvlens.model.inputs import Names
from kvlens.model.storage import save_model
from kvlens.model.transformer import HookedKVTransformer

MAPS = "maps.safetensors"


class HookedKVRegressor(nn.Module):
    """Numbers in, one number per position out.

    Args:
        cfg: configuration of the transformer; its ``d_vocab`` is not used (1 will do).
        d_input: number of input values at each position.

    Attributes:
        read_in: Linear, d_input -> d_model.
        transformer: the :class:`HookedKVTransformer`; ``with model.transformer.hooks(...)`` acts on the regressor's passes.
        read_out: Linear, d_model -> 1.

    Raises:
        KVLensError: ``d_input`` below 1, or a kind of positions that a regressor does not support.
    """

    def __init__(self, cfg: HookedKVTransformerConfig, d_input: int):
        super().__init__()
        if cfg.positional_embedding_type == "shortformer":  # its positions are not added to the residual stream
            raise KVLensError(
                "HookedKVRegressor: positional_embedding_type='shortformer' needs tokens; take standard, sinusoidal, rotary, "
                "alibi or none"
            )
        self.d_input = d_input
        self.transformer = HookedKVTransformer(cfg)
        self.cfg = self.transformer.cfg
        with torch.random.fork_rng([], enabled=cfg.seed is not None):
            if cfg.seed is not None:
                torch.default_generator.manual_seed(cfg.seed)
            self.read_in = nn.Linear(d_input, self.cfg.d_model, dtype=self.cfg.dtype)
            self.read_out = nn.Linear(self.cfg.d_model, 1, dtype=self.cfg.dtype)
        self.to(self.transformer.W_E.device)
        for unused in (self.transformer.embed, self.transformer.unembed):
            unused.requires_grad_(False)

    def forward(self, inputs: Float[Tensor, "batch pos d_input"]) -> Float[Tensor, "batch pos"]:
        """Predict one number at each position from the inputs up to it (or from all, with bidirectional attention).

        Raises:
            KVLensError: inputs of the wrong size, or more positions than ``n_ctx`` if the model limits the length of a text.
        """
        stream = self.transformer
        resid = stream.hook_embed(self.read_in(inputs.to(self.read_in.weight.dtype)))
        resid = stream.get_residual(resid, 0, return_shortformer_pos_embed=False)
        resid = stream(resid, start_at_layer=0, stop_at_layer=self.cfg.n_layers)
        if self.cfg.normalization_type is not None:
            resid = stream.ln_final(resid)
        return self.read_out(resid).squeeze(-1)

    def run_with_cache(
        self, inputs: Float[Tensor, "batch pos d_input"], names_filter: Names = None
    ) -> tuple[Float[Tensor, "batch pos"], ActivationCache]:
        """As ``HookedTransformer.run_with_cache``, on numbers."""
        cache, hooks, _ = self.transformer.get_caching_hooks(names_filter)
        with self.transformer.hooks(fwd_hooks=hooks):
            predicted = self(inputs)
        return predicted, ActivationCache(cache, self.transformer)

    def run_with_hooks(
        self, inputs: Float[Tensor, "batch pos d_input"], fwd_hooks: Sequence[tuple[str | Callable, Callable]] = ()
    ) -> Float[Tensor, "batch pos"]:
        """As ``HookedTransformer.run_with_hooks``, on numbers."""
        with self.transformer.hooks(fwd_hooks=list(fwd_hooks)):
            return self(inputs)

    def save(self, folder: str | Path, *, overwrite: bool = False, stored_dtype: torch.dtype | str | None = None) -> None:
        """Write ``folder`` as :meth:`HookedKVTransformer.save` does, with the two linear maps next to the weights."""
        stored_dtype = None if stored_dtype is None else dtype_of(stored_dtype, "save: stored_dtype")
        maps = {name: p.detach().to("cpu", stored_dtype or p.dtype) for name, p in self.named_parameters() if "read_" in name}
        stored = save({name: value.contiguous() for name, value in maps.items()})
        save_model(self.transformer, folder, overwrite=overwrite, stored_dtype=stored_dtype, further={MAPS: stored})

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str | None = None) -> "HookedKVRegressor":
        """Read what :meth:`save` wrote.

        Raises:
            KVLensError: the folder was not written by :meth:`save`, or is damaged.
        """
        transformer = HookedKVTransformer.load(folder, device=device)
        path = Path(folder) / MAPS
        try:
            maps = load_file(path)
            model = cls(transformer.cfg, maps["read_in.weight"].shape[1])
            for name in ("read_in", "read_out"):
                map_of = {key.removeprefix(f"{name}."): value for key, value in maps.items() if key.startswith(f"{name}.")}
                model.get_submodule(name).load_state_dict(map_of)
        except (SafetensorError, OSError, KeyError, IndexError, RuntimeError) as error:
            raise KVLensError(f"load: {path} is missing or damaged ({error}); was it written by a regressor?") from error
        model.transformer.load_state_dict(transformer.state_dict())
        model.transformer.rounded_from = transformer.rounded_from
        return model
