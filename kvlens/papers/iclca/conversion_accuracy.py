"""``conversion-accuracy``: does a model keep what it learned in context when the prompt becomes a bias? (ICLCA table 2)

The task is the trigger-token bigrams of ICLCA sec. 6.2, cut in two: the prompt shows what follows a trigger, the text uses the
trigger again. The scored positions are the triggers in the text whose follower the prompt has shown, except a trigger at the
very end of the prompt, whose follower is the first letter of the text. The same text is read in three conditions:

- *with prompt*: the model sees [prompt; text];
- *without prompt*: the text alone. The follower of a trigger can then only be guessed at its first use in the text;
- *converted*: the text alone, with the prompt's bias attached.

The converted and the prompted model compute the same function, so every prediction must be the same. Rounding can change a
prediction only if the two largest logits are nearly equal: the margin of each prediction is measured along with the change.

Both are measured on two distributions of sequences (`kvlens.tasks.ngrams`): that of the shipped model's training, dense with
triggers, and the paper's (``markov``), next to the paper's numbers. For the second the model is trained further on sequences
of that kind (``further``), from which alone it would learn more slowly, since they have few triggers.

The shipped model ``bigram-linear`` has the paper's size: 12 layers of width 128. The setting ``model`` may name the folder of
another one, or be None: then a model is trained with the settings ``training``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.learned import TrainingRun, trained_further
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import Comparison, share_interval
from kvlens.papers.iclca.conversion_error import float64_logits, pair_errors
from kvlens.tasks import Batch, make_task
from kvlens.tasks.ngrams import BigramTask
from kvlens.training import find_recipe

PROMPTED, ALONE, CONVERTED = "with prompt", "without prompt", "converted"
CONDITIONS = (PROMPTED, ALONE, CONVERTED)
ENOUGH = 0.999
"""The in-context accuracy from which the task counts as learned."""
NEAR_CHANCE = 0.01
"""An accuracy significantly less than this above chance is called chance."""
PRINTED = {PROMPTED: 0.9995, ALONE: 0.0223, CONVERTED: 0.9995}
"""Table 2: in-context accuracy."""
NEAR_PRINTED = 0.005
"""An accuracy on the paper's sequences significantly above the printed one less this is called as high as printed."""

_TASK = dict(find_recipe("bigram-linear").task_settings)
_TINY_TRAINING = dict(
    model=dict(n_layers=1, d_model=32, d_head=16, attention="linear", kv_shift=True, attn_only=True),
    settings=dict(steps=30, batch_size=16, learning_rate=1e-2, eval_every=15, eval_sequences=16, stop_at_accuracy=1.0),
)


@experiment(
    "ICLCA table 2 and sec. 6.2",
    "Does a model make the same predictions with a converted prompt as with the prompt itself?",
    cost=(
        "a few seconds, including the training of a small model",
        "ten minutes on one core, with the shipped model",
    ),
    model=(None, "bigram-linear"),
    training=(_TINY_TRAINING, None),
    further=dict(
        length=(24, 128),
        training=dict(
            steps=(5, 600),
            batch_size=16,
            learning_rate=5e-4,
            weight_decay=0.05,
            eval_every=(5, 50),
            eval_sequences=(16, 512),
            seed=0,
        ),
    ),
    task=(dict(n_letters=13, n_triggers=3, length=24, trigger_rate=0.5), _TASK),
    prompt_length=(11, 32),
    n_sequences=(40, 4096),
    batch_size=(16, 128),
    seed=0,
)
def conversion_accuracy(settings: Settings, tell: Tell) -> Reproduction:
    """Measure the three conditions on the sequences given by ``settings``."""
    task = make_task("bigrams", **settings["task"])
    assert isinstance(task, BigramTask)
    model = obtain_model(settings, task, tell)
    how, on_paper = settings["further"], replace(task, law="markov")
    further, result = trained_further(model.requires_grad_(True), replace(on_paper, length=how["length"]), how["training"])
    course = result.heldout[["step", "loss", "accuracy"]]
    tell(f"trained further on the paper's sequences, {result.steps} steps: accuracy {course['accuracy'].iloc[-1]:.1%}")
    by_law: dict[str, dict[str, pd.DataFrame]] = {}
    for sequences, reader in ((task, model), (on_paper, further)):
        predictions, errors = measure(reader.requires_grad_(False), sequences, settings, tell)
        by_law[sequences.law] = dict(accuracy=accuracy_by_use(predictions), predictions=predictions, errors=errors)
    own, paper, guess = by_law[task.law], by_law[on_paper.law], task.chance
    tables = {name: pd.concat([t[name].assign(law=law) for law, t in by_law.items()], ignore_index=True) for name in own}
    enough, where = PRINTED[PROMPTED] - NEAR_PRINTED, ", the paper's sequences"
    return Reproduction(
        tables={**tables, "further": course},
        figure=lambda: draw(own["accuracy"], guess),
        comparisons=[
            *compare(own["predictions"], own["errors"], guess),
            *compare(paper["predictions"], paper["errors"], guess, where=where, enough=enough, printed=PRINTED),
        ],
        differences=[*_differences(model, task, settings)],
    )


def obtain_model(settings: Settings, task: BigramTask, tell: Tell) -> HookedKVTransformer:
    """Load the model named in ``settings``, or train one.

    Raises:
        KVLensError: there is no such model, or it does not fit the task.
    """
    name = settings["model"]
    if name is None:
        how = settings["training"]
        model, result = TrainingRun(task, "trained here", how["model"], {"seed": 0, **how["settings"]}).finished()
        tell(f"trained for {result.steps} steps: accuracy {result.heldout['accuracy'].iloc[-1]:.1%}")
    else:
        model = hooked_model(name)
    task.check_fit(model)
    assert isinstance(model, HookedKVTransformer)
    return model.eval().requires_grad_(False)


# --- measuring ---


def measure(model: HookedKVTransformer, task: BigramTask, settings: Settings, tell: Tell) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Run the three conditions on ``n_sequences`` sequences.

    Returns:
        predictions: one row per condition and scored position: ``sequence``, ``position`` (in the text), ``use`` (of this
            trigger in the text, from 1), ``trigger``, ``follower``, ``condition``, ``prediction``, ``is_right``; ``margin`` (of
            the largest logit over the second) and ``change`` (largest absolute difference of a logit from the prompted one's).
        errors: one row per sequence: relative error of the ``conversion``, and of the float32 ``forward_pass`` with the prompt,
            of the logits at all positions of the text.
    """
    cut, generator = settings["prompt_length"], torch.Generator().manual_seed(settings["seed"])
    predictions, errors, done = [], [], 0
    while done < settings["n_sequences"]:
        n = min(settings["batch_size"], settings["n_sequences"] - done)
        batch = hide_open_trigger(task.sample_with_prompt(n, generator, cut), cut)
        logits = read_three_ways(model, batch.inputs, cut)
        exact = float64_logits(model, batch.inputs.to(model.W_E.device)).cpu()[:, cut:]
        error = {
            "conversion": pair_errors(logits[CONVERTED], logits[PROMPTED]),
            "forward_pass": pair_errors(logits[PROMPTED], exact),
        }
        errors.append(pd.DataFrame({"sequence": range(done, done + n), **{name: e.numpy() for name, e in error.items()}}))
        predictions.append(score(task, Batch(*(part[:, cut:] for part in batch)), logits, first_sequence=done))
        done += n
        tell(f"{done} of {settings['n_sequences']} sequences")
    return pd.concat(predictions, ignore_index=True), pd.concat(errors, ignore_index=True)


def hide_open_trigger(batch: Batch, cut: int) -> Batch:
    """The same sequences, not scored at the last letter of the prompt, whose follower is the first letter of the text."""
    return batch._replace(scored=batch.scored & (batch.inputs != batch.inputs[:, cut - 1 : cut]))


@torch.no_grad()
def read_three_ways(
    model: HookedKVTransformer, tokens: Int[Tensor, "batch pos"], cut: int
) -> dict[str, Float[Tensor, "batch text_pos d_vocab"]]:
    """Logits on the text, the columns from ``cut`` on, under each of `CONDITIONS`, on the CPU; those before are the prompt."""
    prompt, text = tokens[:, :cut], tokens[:, cut:]
    with model.kv_bias(convert_prompt(model, prompt)):
        converted = model(text)
    logits = {PROMPTED: model(tokens)[:, cut:], ALONE: model(text), CONVERTED: converted}
    return {condition: x.cpu() for condition, x in logits.items()}


def use_of_trigger(text: Int[Tensor, "batch pos"], n_triggers: int) -> Int[Tensor, "batch pos"]:
    """Count at each trigger how often it has occurred in the text so far, this occurrence included; 0 at other letters."""
    is_use = text[:, :, None] == torch.arange(n_triggers)
    return (is_use.cumsum(dim=1) * is_use).sum(dim=2)


def score(
    task: BigramTask,
    text: Batch,
    logits: Mapping[str, Float[Tensor, "batch pos d_vocab"]],
    first_sequence: int = 0,
) -> pd.DataFrame:
    """The rows of `measure`'s ``predictions``, from a batch without its prompts and the logits by condition."""
    scored: Bool[Tensor, "batch pos"] = text.scored
    sequence, position = scored.nonzero(as_tuple=True)
    shared = {
        "sequence": (sequence + first_sequence).numpy(),
        "position": position.numpy(),
        "use": use_of_trigger(text.inputs, task.n_triggers)[scored].numpy(),
        "trigger": [*task.tokens_as_text(text.inputs[scored])],
        "follower": [*task.tokens_as_text(text.targets[scored])],
    }
    frames = []
    for condition in CONDITIONS:
        here = logits[condition][scored]
        largest = here.topk(2, dim=-1)
        own = {
            "condition": condition,
            "prediction": [*task.tokens_as_text(largest.indices[:, 0])],
            "is_right": (largest.indices[:, 0] == text.targets[scored]).numpy(),
            "margin": (largest.values[:, 0] - largest.values[:, 1]).numpy(),
            "change": (here - logits[PROMPTED][scored]).abs().amax(dim=-1).numpy(),
        }
        frames.append(pd.DataFrame({**shared, **own}))
    return pd.concat(frames, ignore_index=True)


def accuracy_by_use(predictions: pd.DataFrame) -> pd.DataFrame:
    """Number of scored positions, and of correct ones, by condition and use of the trigger in the text.

    ``low`` and ``high`` are the ends of the accuracy's 95 % interval over sequences.
    """
    grouped = predictions.groupby(["condition", "use"], sort=False)
    table = grouped["is_right"].agg(n_scored="size", n_right="sum")
    ends = [share_interval(rows["is_right"], rows["sequence"]) for _, rows in grouped]
    table = table.assign(accuracy=table["n_right"] / table["n_scored"], low=[a for a, _ in ends], high=[b for _, b in ends])
    return table.reset_index()


def n_disagreeing(predictions: pd.DataFrame) -> int:
    """Number of scored positions at which the converted model predicts another letter than the prompted one."""
    by_condition = predictions.pivot(index=["sequence", "position"], columns="condition", values="prediction")  # noqa: PD010
    return int((by_condition[CONVERTED] != by_condition[PROMPTED]).sum())


# --- comparisons ---


def compare(
    predictions: pd.DataFrame,
    errors: pd.DataFrame,
    guess: float,
    *,
    where: str = "",
    enough: float = ENOUGH,
    printed: Mapping[str, float] | None = None,
) -> Iterator[Comparison]:
    """Table 2's claim: the converted model is as accurate as the prompted one, the model without the prompt guesses.

    Args:
        predictions, errors: of `measure`.
        guess: the accuracy of guessing.
        where: which sequences, for the words.
        enough: the accuracy from which the task counts as learned.
        printed: the paper's numbers, by condition.
    """
    right = {condition: rows["is_right"] for condition, rows in predictions.groupby("condition")}
    paper = {} if printed is None else printed

    def accuracy(what: str, claim: str, rows: pd.Series, bound: float, condition: str, below: bool = False) -> Comparison:
        found = Comparison.of_share(f"{what}{where} ({_count(rows)})", claim, rows, bound, below=below)
        return replace(found, paper=paper.get(condition))

    claim = f"the model has learned to use its context: significantly more than {enough:.2%} of its predictions are right"
    yield accuracy("in-context accuracy with the prompt", claim, right[PROMPTED], enough, PROMPTED)
    what = f"in-context accuracy of the converted model{where} ({_count(right[CONVERTED])})"
    claim, score = "the converted model is as accurate as the model with the prompt", float(right[CONVERTED].mean())
    apart = abs(score - float(right[PROMPTED].mean()))
    yield Comparison.at_most(what, claim, apart, 0, shown=score, paper=paper.get(CONVERTED))
    what = f"scored positions at which the converted model predicts another letter than the prompted one{where}"
    yield Comparison.at_most(what, "the conversion is exact: none", float(n_disagreeing(predictions)), 0)
    first = predictions[(predictions["condition"] == ALONE) & (predictions["use"] == 1)]["is_right"]
    bound = guess + NEAR_CHANCE
    claim = f"without the prompt accuracy falls to chance, {guess:.4f} here (significantly below {bound:.4f})"
    yield accuracy("accuracy without the prompt, at the first use of a trigger", claim, first, bound, ALONE, below=True)
    conversion, own = float(errors["conversion"].mean()), float(errors["forward_pass"].mean())
    what = f"relative error of the converted model's logits, mean over sequences{where}"
    claim = f"the conversion is exact up to rounding: at most twice the float32 forward pass's own error, {own:.2g}"
    yield Comparison.at_most(what, claim, conversion, 2 * own)


def _count(is_right: pd.Series) -> str:
    return f"{is_right.sum():,} of {len(is_right):,} right"


def _differences(model: HookedKVTransformer, task: BigramTask, settings: Settings) -> Iterator[str]:
    cfg = model.cfg
    if settings["model"] is None:
        yield f"A model of {cfg.n_layers} layers and width {cfg.d_model}, trained here, not the paper's 12 layers of 128."
    if cfg.kv_shift is not None:
        yield "The model has KV shift, the paper's has none."
    yield (
        f"Sequences of {task.length} letters, the first {settings['prompt_length']} of them the prompt; a letter that follows "
        f"no trigger is one with probability {task.trigger_rate:g}. In the paper's distribution (sec. 6.2) the letter after a "
        "non-trigger is uniform over all letters; the paper gives neither lengths nor whether a trigger may follow one, which "
        "it never does here."
    )
    further = settings["further"]
    yield (
        "The paper's model is trained on its sequences from the start; this one on denser ones, and then for "
        f"{further['training']['steps']} steps of {further['training']['batch_size']} on the paper's, of {further['length']} "
        "letters."
    )
    yield "Only triggers whose follower is in the prompt are scored; at their first use the text does not show it yet."


# --- figure ---


def draw(accuracy: pd.DataFrame, guess: float, n_uses: int = 4) -> Figure:
    """Accuracy by use of a trigger in each condition, with 95 % intervals over sequences."""
    title, shown = "Accuracy by use of a trigger, with the prompt and with its bias", accuracy[accuracy["use"] <= n_uses]
    return draw_panels(shown, "use", by="condition", title=title, lines={"chance": guess}, ticks=True)
