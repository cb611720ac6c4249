"""A HookedKVTransformer that reads and predicts numbers instead of tokens: in-context regression (LECTURE; Garg et al. 2022).

A position is a vector of numbers; a linear map puts it into the residual stream, the transformer's blocks and final norm follow
(with every hook point), and a linear map reads one number at each position. The embedding and unembedding of the transformer
stay unused. Only absolute positions are added here; rotary ones act inside the attention, as always.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from kvlens.errors import KVLensError
from kvlens.files import write_folder
from kvlens.model.config import HookedKVTransformerConfig
from kvlens.model.storage import check_model_folder
from kvlens.model.transformer import HookedKVTransformer

MAPS = "maps.safetensors"


class HookedKVRegressor(nn.Module):
    """Numbers in, one number a position out.

    Args:
        cfg: of the transformer; its ``d_vocab`` plays no role (1 will do).
        d_input: numbers that make up a position.

    Attributes:
        read_in: Linear, d_input -> d_model.
        transformer: the :class:`HookedKVTransformer`; hook it as usual.
        read_out: Linear, d_model -> 1.
    """

    def __init__(self, cfg: HookedKVTransformerConfig, d_input: int):
        super().__init__()
        if d_input < 1:
            raise KVLensError(f"HookedKVRegressor: d_input must be at least 1, got {d_input}")
        self.d_input = d_input
        self.transformer = HookedKVTransformer(cfg)
        self.cfg = self.transformer.cfg
        with torch.random.fork_rng([], enabled=cfg.seed is not None):
            if cfg.seed is not None:
                torch.manual_seed(cfg.seed)
            self.read_in = nn.Linear(d_input, self.cfg.d_model, dtype=self.cfg.dtype)
            self.read_out = nn.Linear(self.cfg.d_model, 1, dtype=self.cfg.dtype)
        self.to(self.transformer.W_E.device)
        for unused in (self.transformer.embed, self.transformer.unembed):
            unused.requires_grad_(False)

    def forward(self, inputs: Float[Tensor, "batch pos d_input"]) -> Float[Tensor, "batch pos"]:
        """Predict one number at each position from what stands up to it (from all, with bidirectional attention).

        Raises:
            KVLensError: a position of another size, or more positions than ``n_ctx`` where positions are learned.
        """
        if inputs.dim() != 3 or inputs.shape[-1] != self.d_input:
            raise KVLensError(f"HookedKVRegressor: expected inputs [batch, pos, {self.d_input}], got {list(inputs.shape)}")
        if self.cfg.has_position_limit and inputs.shape[1] > self.cfg.n_ctx:
            raise KVLensError(f"HookedKVRegressor: {inputs.shape[1]} positions are more than n_ctx={self.cfg.n_ctx}")
        resid = self.read_in(inputs)
        if self.cfg.positional_embedding_type in ("standard", "sinusoidal"):
            resid = resid + self.transformer.pos_embed(inputs[..., 0].long(), 0).to(resid.dtype)
        resid = self.transformer(resid, start_at_layer=0, stop_at_layer=self.cfg.n_layers)
        if self.cfg.normalization_type is not None:
            resid = self.transformer.ln_final(resid)
        return self.read_out(resid).squeeze(-1)

    def save(self, folder: str | Path, *, overwrite: bool = False, stored_dtype: torch.dtype | None = None) -> None:
        """Write ``folder`` as :meth:`HookedKVTransformer.save` does, with the two linear maps beside the weights."""
        check_model_folder(folder, overwrite=overwrite)
        maps = {name: p.detach().to("cpu", stored_dtype or p.dtype) for name, p in self.named_parameters() if "read_" in name}

        def fill(temporary: Path) -> None:
            self.transformer.save(temporary, stored_dtype=stored_dtype)
            (temporary / MAPS).write_bytes(save({name: value.contiguous() for name, value in maps.items()}))

        write_folder(folder, fill)

    @classmethod
    def load(cls, folder: str | Path, *, device: Any = None) -> "HookedKVRegressor":
        """Read what :meth:`save` wrote.

        Raises:
            KVLensError: not such a folder, or a damaged one.
        """
        transformer = HookedKVTransformer.load(folder, device=device)
        try:
            maps = load_file(Path(folder) / MAPS)
            model = cls(transformer.cfg, maps["read_in.weight"].shape[1])
            model.load_state_dict(maps, strict=False)
        except (SafetensorError, OSError, KeyError, RuntimeError) as error:
            raise KVLensError(f"load: {Path(folder) / MAPS} is missing or damaged ({error})") from error
        model.transformer.load_state_dict(transformer.state_dict())
        return model
