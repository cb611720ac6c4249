"""Which families KVTransformerBridge runs. The tests go through :data:`MODEL_TYPES`, with a tiny random model of each
(``tests/model/tiny_hf.py``).

- *conversion*: a converted prompt gives the prompted model's logits, at most 1.5 times as far from them as Transformers' own
  cache is where a text is cut at the same place, and the same greedy tokens.
  Methods with fewer keys, or with features, run too, as on a HookedKVTransformer: of hybrids they reduce the attention layers.
- *causes*: ``kvlens.explain`` and the attributions of :mod:`kvlens.analyses`, to sentences, tokens, heads and positions.
- *patterns*: what a text reads of a prompt by position: softmax attention, and the exact effective attention of a state.
- *states*: how a recurrent layer updates its state, which a bias holds in addition to the keys and values of attention.
- *logits of heads*: direct logit attribution (``bias_decomposition``). It needs heads that write to the residual stream
  directly; where a norm or a factor stands behind attention, it says so.

Every model is compared with Transformers when it is loaded (:mod:`kvlens.bridge.comparison`): plain, hooked, and under a
converted prompt. A model of any other family that the bridge computes step by step is loaded if it passes, and refused where
its logits differ by more than rounding (StableLM's do).
:func:`kvlens.analyses.conversion_error` measures how exact a conversion is.

Without a bias, and with nothing hooked to a recurrent layer, a pass is TransformerLens' own, bit by bit.

**A model family on the bridge.** `KVTransformerBridge` loads any model that TransformerLens' bridge builds and whose logits are
those of Transformers (`kvlens/bridge/comparison.py`, at every load); `kvlens/bridge/table.py` lists the families that are
tested. A new one is a row there and a row in `tests/model/tiny_hf.py`, the tiny random models of all tests: in
`ON_BRIDGE_ALONE`, or in `ON_BOTH` if HookedKVTransformer loads it too. Where its layers are computed like another family's, add
its name to `LIKE_THE_OTHERS` in `tests/bridge/bridge_models.py`, which leaves out the slowest tests.
`tests/bridge/test_table.py` checks that model and row agree; exactness, hook names, gradients and loading go through all
families: `pytest tests/bridge -k NAME -m "slow or not slow"`. A family of which TransformerLens has no adapter needs one in
`adapters.py`, whose `submodules=` have its names of projections; attention that its bridge leaves to Transformers is opened up
in `native.py`, as `q_proj` to `o_proj`, and named in `NATIVE` (`parts.py`); recurrent layers need a mixer in `kvlens/mixers`.
ALiBi (Bloom, MPT) needs a component that `_is_shown` knows (`parts.py`), slopes in the `ScoreRule` of `SoftmaxLayer`, distances
in its `scores_as_said`, and a term in its `_columns_of` that takes away what the component adds to the scores of a bias, whose
keys it finds behind the text.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelType:
    """A row of the table, about one model type of Transformers.

    Attributes:
        name: as people call it.
        attention: whether it has layers of softmax attention.
        states: the rule of its recurrent layers; None without such layers.
        logits_of_heads: whether heads write to the residual stream directly.
        remarks: what is special about it.
    """

    name: str
    attention: bool = True
    states: str | None = None
    logits_of_heads: bool = True
    remarks: str = ""

    @property
    def patterns(self) -> str:
        """The kinds of its patterns."""
        effective = self.states is not None and self.states != CONVOLUTION
        return ", ".join(["softmax"] * self.attention + ["effective"] * effective)


CONVOLUTION = "inputs of short convolutions"
DELTA, KDA, LIGHTNING, SSD = "gated delta rule", "Kimi delta attention", "lightning attention", "state space (Mamba-2)"
SELECTIVE, RWKV = "selective scan (Mamba-1)", "linear attention with a decay and a bonus"
_WINDOW = "sliding window"
_EXPERTS = "experts"
_BEHIND = "norms behind attention"
_AS_MAMBA_2 = "generates with a cache only, unless it has a tokenizer"
MODEL_TYPES: dict[str, ModelType] = {
    "gpt2": ModelType("GPT-2", remarks="learned positions"),
    "gpt_neox": ModelType(
        "GPT-NeoX, Pythia", remarks="one projection for queries, keys and values; `hook_rot_q` and `hook_rot_k` added"
    ),
    "gptj": ModelType("GPT-J", remarks="attention and MLP side by side; part of each head is rotated, in neighboring pairs"),
    "opt": ModelType("OPT", remarks="learned positions; not OPT-350M, whose norms stand behind"),
    "llama": ModelType("Llama"),
    "mistral": ModelType("Mistral", remarks=_WINDOW),
    "mixtral": ModelType("Mixtral", remarks=_EXPERTS),
    "qwen2": ModelType("Qwen2, Qwen2.5", remarks=f"biases of queries, keys and values; {_WINDOW}"),
    "qwen3": ModelType("Qwen3", remarks="normalized queries and keys"),
    "qwen3_moe": ModelType("Qwen3-MoE", remarks=f"normalized queries and keys; {_EXPERTS}"),
    "gemma": ModelType("Gemma 1"),
    "gemma2": ModelType("Gemma 2", logits_of_heads=False, remarks=f"soft-capped scores and logits; {_WINDOW}; {_BEHIND}"),
    "gemma3_text": ModelType("Gemma 3", logits_of_heads=False, remarks=f"{_WINDOW}; {_BEHIND}"),
    "gpt_oss": ModelType("GPT-OSS", remarks=f"attention sinks; {_WINDOW}; {_EXPERTS}"),
    "phi3": ModelType(
        "Phi-3", remarks=f"as GPT-NeoX; {_WINDOW}; not with LongRoPE, whose angles change with the length of the text"
    ),
    "phi": ModelType("Phi-1, Phi-2", remarks="attention and MLP side by side; part of each head is rotated"),
    "olmo": ModelType("OLMo-1", remarks="norms without weights"),
    "olmo2": ModelType("OLMo-2", logits_of_heads=False, remarks=_BEHIND),
    "olmo3": ModelType("OLMo-3", logits_of_heads=False, remarks=f"{_WINDOW}; {_BEHIND}"),
    "olmoe": ModelType("OLMoE", remarks=_EXPERTS),
    "glm": ModelType("GLM-4 9B (glm)", remarks="part of each head is rotated, in neighboring pairs"),
    "glm4": ModelType("GLM-4 0414 (glm4)", logits_of_heads=False, remarks=f"as the former; {_BEHIND}"),
    "granite": ModelType("Granite 3", logits_of_heads=False, remarks="factors behind attention"),
    "starcoder2": ModelType("StarCoder2", remarks=_WINDOW),
    "smollm3": ModelType("SmolLM3", remarks="some layers without rotary positions"),
    "seed_oss": ModelType("Seed-OSS", remarks="biases of queries, keys and values"),
    "deepseek_v3": ModelType("DeepSeek-V3", remarks=f"latent attention, kept as the keys and values of every head; {_EXPERTS}"),
    "qwen3_5_text": ModelType(
        "Qwen3.5", states=DELTA, remarks="gated attention; the language model of checkpoints with images"
    ),
    "qwen3_next": ModelType("Qwen3-Next", states=DELTA, remarks=f"gated attention; {_EXPERTS}"),
    "olmo_hybrid": ModelType(
        "OLMo-Hybrid", states=DELTA, logits_of_heads=False, remarks=f"write strength of up to 2; {_BEHIND}"
    ),
    "kimi_linear": ModelType("Kimi Linear", states=KDA, remarks=f"latent attention; {_EXPERTS}; kvlens' own adapter"),
    "minimax": ModelType("MiniMax", states=LIGHTNING, logits_of_heads=False, remarks=f"{_EXPERTS}; kvlens' own adapter"),
    "bamba": ModelType("Bamba", states=SSD),
    "granitemoehybrid": ModelType("Granite 4", states=SSD, logits_of_heads=False, remarks="factors behind attention"),
    "falcon_h1": ModelType(
        "Falcon-H1", states=SSD, logits_of_heads=False, remarks="attention and state in every layer; factors behind them"
    ),
    "nemotron_h": ModelType("Nemotron-H", states=SSD, remarks=f"layers of one kind each, MLPs and {_EXPERTS} among them"),
    "mamba2": ModelType("Mamba-2", attention=False, states=SSD, remarks=_AS_MAMBA_2),
    "mamba": ModelType("Mamba", attention=False, states=SELECTIVE, remarks=f"every channel is a head; {_AS_MAMBA_2}"),
    "falcon_mamba": ModelType("Falcon-Mamba", attention=False, states=SELECTIVE, remarks=f"as Mamba; {_AS_MAMBA_2}"),
    "rwkv56": ModelType(
        "RWKV-5.1, RWKV-5.2, RWKV-6", attention=False, states=RWKV, remarks="MLPs that shift; kvlens' own model"
    ),
    "jamba": ModelType("Jamba", states=SELECTIVE, remarks=f"as Mamba; attention without positions; {_EXPERTS}"),
    "lfm2": ModelType("LFM2", states=CONVOLUTION, remarks="layers that are a short convolution alone, without heads"),
}
"""By Transformers' ``model_type``."""
NOT_BRIDGED: dict[str, str] = {
    "GPTNeoForCausalLM": "its attention is left to Transformers; HookedKVTransformer runs it",
    "BloomForCausalLM": "its scores depend on positions (ALiBi); HookedKVTransformer runs it",
}
"""Architectures that are refused, as others that are not in the table may be, and why."""
SUPPORTED = ", ".join(family.name for family in MODEL_TYPES.values())


def table() -> str:
    """The table as Markdown."""
    head = ["family", "conversion", "causes", "patterns", "states", "logits of heads", "remarks"]
    rows = [
        [
            f.name,
            "exact",
            "yes",
            f.patterns,
            f.states or "none",
            "yes" if f.logits_of_heads else "no",
            f.remarks,
        ]
        for f in MODEL_TYPES.values()
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


__doc__ = f"{__doc__}\n{table()}\n\nRefused by name, among others:\n\n" + "\n".join(
    f"- `{architecture}`: {why}." for architecture, why in NOT_BRIDGED.items()
)
