"""What can be trained by name: the recipes of the models that ship with kvlens, and every task with a default model.

A recipe is data: task, model and training settings. ``kvlens train NAME`` runs it; options change any of its settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlens.checks import checked
from kvlens.errors import check_known
from kvlens.model import HookedKVTransformerConfig
from kvlens.tasks import Task, task_names
from kvlens.tasks.task import Model

DEFAULT_MODEL: dict[str, object] = dict(
    n_layers=2, d_model=128, d_head=32, act_fn="gelu", normalization_type="LN", positional_embedding_type="rotary"
)
"""What a model is unless its settings say otherwise. Its heads have a width of 32, so that ``d_model=32`` alone is one head."""
NOT_SETTINGS = ("device", "model_name")
"""Fields of a configuration that are arguments of `build_model`."""


@dataclass(frozen=True)
class Recipe:
    """A task, a model and how to train it.

    Attributes:
        name: name of the recipe and of the model.
        summary: what the model is for, in a sentence or two, for its card.
        task: a name of :func:`kvlens.tasks.task_names`, with its ``task_settings``.
        model: fields of :class:`kvlens.HookedKVTransformerConfig`, over those of `DEFAULT_MODEL`.
        training: fields of :class:`kvlens.training.TrainSettings`.
        stored_dtype: dtype of the weights on disk.
        architecture: None for a kvlens model; "qwen3_5" for Transformers' ``Qwen3_5ForCausalLM``, of whose configuration
            ``model`` then holds the fields (:mod:`kvlens.training.hybrid`).
    """

    name: str
    summary: str
    task: str
    task_settings: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    stored_dtype: str = "float32"
    architecture: str | None = None


_DOCS = dict(corpus="docs", vocab_size=1024, length=512, heldout_length=320)
_DOCS_TRAINING = dict(
    steps=100_000,
    batch_size=16,
    learning_rate=2.5e-3,
    weight_decay=0.1,
    eval_every=250,
    eval_sequences=96,
    precision="bfloat16",
)
_FACTS_TRAINING = dict(batch_size=32, learning_rate=3e-3, weight_decay=0.05, eval_every=100)
_HOPS = dict(max_facts=4, length=64, whole_share=0.0, hops=2, notes=True)
_HOPS_MODEL = dict(
    n_layers=2, d_model=64, d_head=16, positional_embedding_type="standard", kv_shift=dict(queries=True, window=4)
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="docs-linear",
            summary="A small language model of English software documentation with linear attention, for trying "
            "prompt-to-weights conversion on real text. It imitates the style of documentation; its content is not reliable.",
            task="text",
            task_settings=_DOCS,
            model=dict(n_layers=4, d_model=192, attention="linear", kv_shift={}),
            training={**_DOCS_TRAINING, "max_minutes": 28.0},
            stored_dtype="float16",
        ),
        Recipe(
            name="docs-shift",
            summary="A small language model of English software documentation with softmax attention and KV shift, for looking "
            "at trained shift coefficients. It imitates the style of documentation; its content is not reliable.",
            task="text",
            task_settings={**_DOCS, "length": 320},
            model=dict(n_layers=4, d_model=192, kv_shift={}),
            training={**_DOCS_TRAINING, "batch_size": 24, "max_minutes": 25.0, "watch": "shift_coef"},
            stored_dtype="float16",
        ),
        Recipe(
            name="docs-gpt2",
            summary="A small language model of English software documentation with softmax attention, learned positions and "
            "GPT-2's blocks, for trying approximate conversion on real text. Corpus and tokenizer are those of docs-linear.",
            task="text",
            task_settings={**_DOCS, "length": 320},
            model=dict(n_layers=4, d_model=192, positional_embedding_type="standard"),
            training={**_DOCS_TRAINING, "batch_size": 8, "learning_rate": 2e-3, "max_minutes": 10.0},
            stored_dtype="float16",
        ),
        Recipe(
            name="facts-linear",
            summary="A linear-attention model that reads a made-up story of two to eight facts and answers questions about "
            "it: correctly with the story, equally well with the story converted to a KV bias, by guessing without it.",
            task="facts",
            task_settings=dict(max_facts=8, length=128, whole_share=0.04),
            model=dict(n_layers=2, attention="linear", kv_shift=dict(queries=True, window=4)),
            training={**_FACTS_TRAINING, "steps": 2200, "precision": "bfloat16"},
            stored_dtype="float16",
        ),
        Recipe(
            name="facts-gpt2",
            summary="A softmax model with learned positions, GPT-2's blocks and a KV shift over a window of 5, that reads a "
            "made-up story of two to six facts and answers questions about it. Plain models of two and of three layers still "
            "took any value of the right kind in the story after 900 steps (36 % and 31 % right on four facts).",
            task="facts",
            task_settings=dict(max_facts=6, length=128),
            model=dict(n_layers=2, positional_embedding_type="standard", kv_shift=dict(queries=True, window=5)),
            training={**_FACTS_TRAINING, "steps": 1100, "precision": "bfloat16"},
            stored_dtype="float16",
        ),
        Recipe(
            name="facts-hops-gpt2",
            summary="A softmax model with learned positions and a KV shift that reads which thing is in which container and "
            "which container is in which room, and answers where a thing is, in one hop or two. In training it also predicts "
            "the room at the word where it can store it while reading, so the position of the stored room is known.",
            task="facts",
            task_settings=_HOPS,
            model=_HOPS_MODEL,
            training={**_FACTS_TRAINING, "steps": 2600},
            stored_dtype="float16",
        ),
        Recipe(
            name="facts-hops-linear",
            summary="facts-hops-gpt2's task for linear attention: three layers with Taylor features, learned positions and a "
            "KV shift, which answer where a thing is in one hop or two.",
            task="facts",
            task_settings=_HOPS,
            model={**_HOPS_MODEL, "n_layers": 3, "attention": "linear", "feature_map": "taylor"},
            training={**_FACTS_TRAINING, "steps": 3000},
            stored_dtype="float16",
        ),
        Recipe(
            name="facts-hybrid",
            summary="A hybrid of Transformers' own class Qwen3_5ForCausalLM, two layers with a gated delta rule around one of "
            "softmax attention, that reads a made-up story of two to four facts and answers questions about it. "
            "KVTransformerBridge.from_zoo loads it.",
            task="facts",
            task_settings=dict(max_facts=4, length=72, whole_share=0.04),
            model=dict(
                hidden_size=64,
                intermediate_size=128,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                linear_num_key_heads=4,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                linear_conv_kernel_dim=4,
            ),
            training={**_FACTS_TRAINING, "steps": 10_000, "eval_every": 200},
            stored_dtype="float16",
            architecture="qwen3_5",
        ),
        Recipe(
            name="bigram-linear",
            summary="The linear-attention model of ICLCA sec. 6.2: 12 layers of width 128 that learn bigrams in context: each "
            "trigger letter is followed by the letter that followed it first. Attention is that of RetNet without decay: the "
            "identity as feature map, RoPE after it, no normalizer.",
            task="bigrams",
            task_settings=dict(length=64, trigger_rate=0.5),
            model=dict(n_layers=12, d_model=128, d_head=32, attention="linear", feature_map="identity", normalizer="none"),
            training=dict(
                steps=3000,
                batch_size=32,
                learning_rate=1e-3,
                weight_decay=0.05,
                eval_every=100,
                eval_sequences=512,
                stop_at_accuracy=1.0,
                precision="bfloat16",
            ),
            stored_dtype="bfloat16",
        ),
        Recipe(
            name="induction-shift-1l",
            summary="One layer of softmax attention with KV shift that copies repeated random tokens: an induction head in a "
            "single layer (KVSA th. 2, fig. 1a).",
            task="induction",
            task_settings=dict(vocab_size=512, length=128, law="both"),
            model=dict(n_layers=1, d_model=128, d_head=32, attn_only=True, kv_shift={}),
            training=dict(steps=800, batch_size=32, learning_rate=2e-3, eval_every=25, watch="shift_coef"),
        ),
        Recipe(
            name="induction-plain-2l",
            summary="Two layers of plain softmax attention that copy repeated random tokens: a previous-token head below an "
            "induction head, the circuit that one shifted layer replaces (KVSA th. 1, fig. 1a).",
            task="induction",
            task_settings=dict(vocab_size=512, length=128, law="both"),
            model=dict(n_layers=2, d_model=128, d_head=32, attn_only=True),
            training=dict(steps=2000, batch_size=32, learning_rate=2e-3, eval_every=50),
        ),
    )
}


@checked
def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or, for the name of a task, that task with the default model.

    Raises:
        KVLensError: there is no such recipe or task; the nearest name is proposed.
    """
    check_known("train: no recipe or task", name, [*RECIPES, *task_names()])
    return RECIPES.get(name) or Recipe(name=name, summary=f"A model of kvlens' task {name!r}.", task=name)


@checked
def build_model(task: Task, settings: Mapping[str, Any], *, name: str | None = None, device: Any = None) -> Model:
    """Build a model for ``task`` with newly initialized weights.

    Args:
        task: determines vocabulary (or features per position), context length and tokenizer.
        settings: fields of :class:`kvlens.HookedKVTransformerConfig` over `DEFAULT_MODEL`; ``kv_shift`` may be a dict of
            :class:`kvlens.KVShiftConfig`'s fields, and True stands for its defaults.
        name: the model's name.
        device: None takes a GPU if there is one.

    Raises:
        KVLensError: an unknown field, or one that contradicts the others.
    """
    values = {**DEFAULT_MODEL, "n_ctx": task.n_positions, "seed": 0, **settings}
    if values.get("attn_only"):
        values["act_fn"] = None
    values.setdefault("d_vocab", task.d_vocab)
    check_known("model: no field", values, [*HookedKVTransformerConfig.__dataclass_fields__.keys() - NOT_SETTINGS])
    return task.new_model(HookedKVTransformerConfig(**values, model_name=name or task.name, device=device))
