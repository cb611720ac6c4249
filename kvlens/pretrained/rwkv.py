"""RWKV-5.1, 5.2 and 6 as Transformers models: Transformers itself has RWKV-4 alone.

    x <- x + time mixing(norm(x))        x <- x + channel mixing(norm(x))

Both mix their normalized input h with that of the token before, h + mu o (h_before - h), with a mu of their own for each
projection. Time mixing is the recurrence of :mod:`kvlens.ops.rwkv`, between projections and a norm of each head with a gate
(none in 5.1); channel mixing is sigmoid(W_r h_r) o W_v relu(W_k h_k)^2. In version 6 mu and the decay depend on the data:

    mu_n + B_n tanh(A_n (h + mu_x o (h_before - h)))        log a = -e^{base + D_b tanh(D_a h_w)}

The forward pass is the reference: token by token, without a cache. A bridge computes time mixing by its
mixer (:class:`kvlens.mixers.layers.RwkvMixer`), and hands channel mixing the row before the first token. The norm behind the
embedding, which depends on nothing but the token, is part of the embedding here.

Source: Eagle and Finch (Peng et al. 2404.05892), sec. 4; https://github.com/BlinkDL/RWKV-LM.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvlens.ops.rwkv import naive_rwkv
from kvlens.ops.short_convolution import naive_short_convolution

MODEL_TYPE = "rwkv56"
LONGEST = 2**24
"""The positions that a text may have: a state has no limit of its own, and a bias counts up to here."""
MIXED = {"5.1": "rkv", "5.2": "rkvg", "6": "wkvrg"}
"""What time mixing has a mix for in each version, in order: receptance, keys, values, gate and decay."""
FAST_MIXES = len(MIXED["6"])
"""Those with a low-rank part."""


class Rwkv56Config(PreTrainedConfig):
    """Sizes of a model.

    Args:
        version: "5.1", "5.2" or "6".
        num_heads: of time mixing.
        key_dim, value_dim: of all heads together; None for ``hidden_size``.
        mix_rank, decay_rank: of the low-rank parts in version 6.
        head_norm_eps: of the norm of each head.
        others: as Transformers'.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        version: str = "6",
        vocab_size: int = 256,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_heads: int = 2,
        key_dim: int | None = None,
        value_dim: int | None = None,
        intermediate_size: int = 128,
        mix_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 1e-5,
        head_norm_eps: float = 64e-5,
        max_position_embeddings: int = LONGEST,
        **others: object,
    ) -> None:
        self.version, self.vocab_size = version, vocab_size
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_heads = self.num_attention_heads = num_heads
        self.key_dim, self.value_dim = key_dim or hidden_size, value_dim or hidden_size
        self.intermediate_size, self.mix_rank, self.decay_rank = intermediate_size, mix_rank, decay_rank
        self.norm_eps, self.head_norm_eps, self.max_position_embeddings = norm_eps, head_norm_eps, max_position_embeddings
        super().__init__(**others)


class RwkvTimeMixing(nn.Module):
    """Time mixing: projections of mixed rows, a recurrence, a norm of each head, a gate."""

    def __init__(self, config: Rwkv56Config) -> None:
        super().__init__()
        width, self.n_heads, self.version = config.hidden_size, config.num_heads, config.version
        self.d_k, self.d_v = config.key_dim // self.n_heads, config.value_dim // self.n_heads
        self.mixed_names = MIXED[self.version]
        self.mu = nn.Parameter(torch.zeros(len(self.mixed_names), width))
        self.receptance, self.key = (nn.Linear(width, config.key_dim, bias=False) for _ in range(2))
        self.value = nn.Linear(width, config.value_dim, bias=False)
        if self.version != "5.1":
            self.gate = nn.Linear(width, config.value_dim, bias=False)
        if self.version == "6":
            self.mu_x = nn.Parameter(torch.zeros(width))
            self.mix_a = nn.Linear(width, FAST_MIXES * config.mix_rank, bias=False)
            self.mix_b = nn.Parameter(torch.zeros(FAST_MIXES, width, config.mix_rank))
            self.decay_a = nn.Linear(width, config.decay_rank, bias=False)
            self.decay_b = nn.Linear(config.decay_rank, config.key_dim, bias=False)
        self.decay = nn.Parameter(torch.zeros(self.n_heads, self.d_k))
        self.bonus = nn.Parameter(torch.zeros(self.n_heads, self.d_k))
        self.norm = nn.GroupNorm(self.n_heads, config.value_dim, config.head_norm_eps)
        self.output = nn.Linear(config.value_dim, width, bias=False)

    def project(self, h: Float[Tensor, "batch pos d_model"], before: Float[Tensor, "batch pos d_model"]) -> tuple[Tensor, ...]:
        """Everything before the recurrence; ``before`` has the row of the token before each.

        Returns:
            What the recurrence gets: q, k [batch, pos, head, d_k], v [batch, pos, head, d_v], log_decay, of k's shape. And the
            gate of its output, behind its activation, which is 1 in version 5.1.
        """
        mixed = dict(zip(self.mixed_names, self._mixed(h, before - h), strict=True))
        wide = torch.promote_types(h.dtype, torch.float32)
        weights = {"r": self.receptance, "k": self.key, "v": self.value}
        q, k, v = (weights[name](mixed[name]).unflatten(-1, (self.n_heads, -1)).to(wide) for name in "rkv")
        gate = torch.nn.functional.silu(self.gate(mixed["g"])) if "g" in mixed else h.new_ones(1)
        decay = self.decay.to(wide).expand(*h.shape[:2], -1, -1)
        if "w" in mixed:
            decay = decay + self.decay_b(self.decay_a(mixed["w"]).tanh()).to(wide).unflatten(-1, (self.n_heads, -1))
        return q, k, v, -decay.exp(), gate

    def _mixed(self, h: Tensor, back: Tensor) -> list[Tensor]:
        if self.version != "6":
            return [h + back * mu for mu in self.mu]
        low = self.mix_a(h + back * self.mu_x).tanh().unflatten(-1, (FAST_MIXES, -1))
        added = torch.einsum("bpmr,mdr->mbpd", low, self.mix_b)
        return [h + back * (mu + more) for mu, more in zip(self.mu, added, strict=True)]

    def finish(self, z: Float[Tensor, "batch pos head d_v"], gate: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The norm of each head in z's dtype, the gate and the output projection."""
        norm = self.norm
        rows = z.flatten(0, 1).flatten(1)
        normed = torch.nn.functional.group_norm(rows, self.n_heads, norm.weight.to(z), norm.bias.to(z), norm.eps)
        output: Tensor = self.output((normed.view(*z.shape[:2], -1) * gate).to(self.output.weight.dtype))
        return output

    def forward(
        self, hidden_states: Float[Tensor, "batch pos d_model"], attention_mask: Tensor | None = None, **unused: object
    ) -> Float[Tensor, "batch pos d_model"]:
        """Of a text from its beginning."""
        q, k, v, log_decay, gate = self.project(hidden_states, naive_row_before(hidden_states, attention_mask))
        mask = None if attention_mask is None else attention_mask.bool()
        return self.finish(naive_rwkv(q, k, v, log_decay, self.bonus, mask)[0], gate)


class RwkvChannelMixing(nn.Module):
    """Channel mixing: the MLP, with a shift of its own."""

    def __init__(self, config: Rwkv56Config) -> None:
        super().__init__()
        self.mu_k, self.mu_r = (nn.Parameter(torch.zeros(config.hidden_size)) for _ in range(2))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.receptance = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        before: Float[Tensor, "batch pos d_model"] | None = None,
        attention_mask: Tensor | None = None,
        **unused: object,
    ) -> Float[Tensor, "batch pos d_model"]:
        """``before`` has the row of the token before each; None for a text from its beginning."""
        back = (naive_row_before(hidden_states, attention_mask) if before is None else before) - hidden_states
        inner = self.key(hidden_states + back * self.mu_k).relu().square()
        gated: Tensor = self.receptance(hidden_states + back * self.mu_r).sigmoid() * self.value(inner)
        return gated


def naive_row_before(
    x: Float[Tensor, "batch pos d_model"], attention_mask: Tensor | None
) -> Float[Tensor, "batch pos d_model"]:
    """The row of the real token before each, zeros before the first."""
    previous = x.new_tensor([1.0, 0.0]).expand(x.shape[-1], 2)
    return naive_short_convolution(x, previous, None, None if attention_mask is None else attention_mask.bool())[0]


class RwkvBlock(nn.Module):
    """One layer."""

    def __init__(self, config: Rwkv56Config) -> None:
        super().__init__()
        self.input_layernorm, self.norm2 = (nn.LayerNorm(config.hidden_size, config.norm_eps) for _ in range(2))
        self.mixer, self.mlp = RwkvTimeMixing(config), RwkvChannelMixing(config)

    def forward(
        self, hidden_states: Float[Tensor, "batch pos d_model"], **of_pass: object
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream after this layer; ``of_pass`` holds the cache and the mask."""
        x = hidden_states + self.mixer(self.input_layernorm(hidden_states), **of_pass)
        after: Tensor = x + self.mlp(self.norm2(x), **of_pass)
        return after


class RwkvBackbone(nn.Module):
    """The model without its unembedding."""

    def __init__(self, config: Rwkv56Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RwkvBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)


class Rwkv56ForCausalLM(PreTrainedModel):
    """A language model."""

    config_class = Rwkv56Config
    base_model_prefix = "model"

    def __init__(self, config: Rwkv56Config) -> None:
        super().__init__(config)
        self.model = RwkvBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        past_key_values: object = None,
        use_cache: bool | None = None,
        **unused: object,
    ) -> CausalLMOutputWithPast:
        """The logits; positions have no effect, and without a bridge a cache stays empty."""
        embed = self.model.embed_tokens
        x = embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = DynamicCache() if use_cache and past_key_values is None else past_key_values
        for layer in self.model.layers:
            x = layer(x, past_key_values=cache, attention_mask=attention_mask)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x)), past_key_values=cache)


AutoConfig.register(MODEL_TYPE, Rwkv56Config)
AutoModelForCausalLM.register(Rwkv56Config, Rwkv56ForCausalLM)
