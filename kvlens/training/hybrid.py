"""Training a hybrid of Transformers' own class: recurrent layers with a gated delta rule, and layers of softmax attention.

The class is ``Qwen3_5ForCausalLM``, and what is written is a folder in Transformers' format, with the checksums of its files in
``config.json``; :meth:`kvlens.KVTransformerBridge.boot_transformers` reads it. The loop, the loss and the settings are those of
:func:`kvlens.training.train`; there is no checkpoint, and an interrupted run starts from scratch.

While the model is trained its recurrent layers are computed by :mod:`kvlens.mixers`, which are faster on short sequences than
Transformers' torch form, and equal to it up to rounding. Three things differ from the usual initial weights:

- decay: A = 1 and a time step drawn log-uniformly from [0.001, 0.2], so that a head forgets within 5 to 1,000 tokens; the usual
  ones forget within a few;
- convolutions: filters drawn from U(0, 2 / kernel), so that a token sees its neighbors from the start;
- the residual stream: larger embeddings, and smaller weights of what the layers write to it, so that layers see tokens rather
  than each other's noise.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from kvlens.bridge import KVTransformerBridge
from kvlens.errors import KVLensError, first_line
from kvlens.files import CONFIG, files_in
from kvlens.mixers import has_mixer, mixer_for
from kvlens.mixers.mixer import DeltaRule
from kvlens.tasks import Batch, Task
from kvlens.training.run import CrossEntropy, Run, Score, TrainSettings
from kvlens.training.trainer import TrainResult, run_to_end

TIME_STEPS = (1e-3, 0.2)
EMBEDDING_RANGE, WRITTEN_SCALE = 0.5, 0.2
CHUNK_SIZE = 24
"""Of the delta rule in training: a divisor of the sequences' length, so that nothing is padded."""


class AnswerLoss(CrossEntropy):
    """The cross-entropy at the scored positions, of a Transformers model or of a bridge to it."""

    def score(self, model: Any, batch: Batch) -> Score:
        """Score the logits at the scored positions."""
        if isinstance(model, KVTransformerBridge):
            logits = model(batch.inputs)[batch.scored]
        else:
            logits = model.lm_head(model.model(batch.inputs, use_cache=False).last_hidden_state[batch.scored])
        return self.of(logits, batch.targets[batch.scored])


def new_hybrid(task: Task, settings: Mapping[str, Any]) -> Qwen3_5ForCausalLM:
    """A hybrid with newly initialized weights.

    Args:
        task: decides the vocabulary and the longest sequence.
        settings: fields of Transformers' ``Qwen3_5TextConfig``, and ``seed``.

    Raises:
        KVLensError: Transformers refuses the settings.
    """
    settings = dict(settings)
    seed = settings.pop("seed", 0)
    tokenizer = task.built_tokenizer
    usual = dict(
        vocab_size=task.d_vocab,
        max_position_embeddings=max(512, task.n_positions),
        initializer_range=0.8 / settings.get("hidden_size", 64) ** 0.5,
        tie_word_embeddings=False,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            config = Qwen3_5TextConfig(**{**usual, "num_hidden_layers": len(settings.get("layer_types", ())), **settings})
            model = Qwen3_5ForCausalLM(config)
        except (ValueError, TypeError, KeyError, RuntimeError, StrictDataclassError) as error:
            raise KVLensError(
                f"model: Transformers refuses the settings of a Qwen3_5TextConfig: {first_line(error)}"
            ) from error
        _initialize(model)
    return model


@torch.no_grad()
def _initialize(model: Qwen3_5ForCausalLM) -> None:
    """The initial weights that differ from Transformers' (see the module)."""
    for module in model.modules():
        if has_mixer(module):
            held: Any = module
            low, high = map(math.log, TIME_STEPS)
            step = torch.empty_like(held.dt_bias).uniform_(low, high).exp()
            held.A_log.zero_()
            held.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # softplus of it is the time step
            nn.init.uniform_(held.conv1d.weight, 0, 2 / held.conv_kernel_size)
    model.model.embed_tokens.weight.normal_(0, EMBEDDING_RANGE)
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            weight.mul_(WRITTEN_SCALE)


@contextmanager
def computed_by_mixers(model: nn.Module) -> Iterator[None]:
    """Compute recurrent layers without a cache by :mod:`kvlens.mixers` inside this context."""
    held: list[Any] = [module for module in model.modules() if has_mixer(module)]
    for layer, module in enumerate(held):
        mixer: Any = mixer_for(module, layer)
        mixer.rule = DeltaRule(CHUNK_SIZE)
        module.forward = lambda hidden_states, mixer=mixer, **_: mixer(hidden_states)[0]
    try:
        yield
    finally:
        for module in held:
            del module.forward


def train_hybrid(model: Qwen3_5ForCausalLM, task: Task, settings: TrainSettings, *, progress: bool = True) -> TrainResult:
    """Train ``model`` in place, without checkpoints; it then has the weights of the best evaluation.

    Args:
        model: of `new_hybrid`.
        task, settings, progress: as for :func:`kvlens.training.train`.
    """
    settings.check_model(model)
    with computed_by_mixers(model):
        return run_to_end(Run(model, task, AnswerLoss(), settings), None, progress)


def write_hybrid(model: Qwen3_5ForCausalLM, task: Task, folder: Path, dtype: torch.dtype) -> list[str]:
    """Write weights (safetensors), configuration and tokenizer in Transformers' format; the names of the files."""
    rounded = copy.deepcopy(model).to(dtype)
    rounded.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if tokenizer := task.built_tokenizer:
        tokenizer.save_pretrained(folder)
    return [name for name in files_in(folder) if name != CONFIG]
