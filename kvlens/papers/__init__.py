"""The papers that kvlens implements: for each, the function for every equation, misprints, claims, and its experiments.

A paper's page is its package; every other module there is an experiment (or what several of them share), with a function of its
own name, declared by `kvlens.papers.harness.run.experiment`. ``kvlens reproduce NAME`` runs one;
``find_experiment(NAME).run(settings, tell)`` does the same from Python.

| page | paper |
|---|---|
| `kvlens.papers.iclca` | Chen, Hu, Jin, Lee, Kawaguchi 2024, *Exact Conversion of In-Context Learning to Model Weights in Linearized-Attention Transformers* (ICLCA), and the same authors' slides, *Duality Between Prompting and Weight Update in Transformers* |
| `kvlens.papers.kvsa` | Xu, Cheng, Wang, Chen 2024, *KV Shifting Attention Enhances Language Modeling* (KVSA) |
| `kvlens.papers.dual` | Ren, Liu 2024, *Towards Understanding How Transformers Learn In-context Through a Representation Learning Lens* (DUAL) |
| `kvlens.papers.lecture` | Vitercik 2024, MS&E 236 Lecture 16, *Transformers* (LECTURE) |

Methods of other papers, by the names that code and tables use:

- KVzip (Kim et al. 2025, arXiv 2505.23416): some of the prompt's keys as they are, those that it attends to when it is read again;
- Attention Matching (Zweiger, Fu, Guo, Kim 2026, *Fast KV Compaction via Attention Matching*, arXiv 2602.16284): a few of the prompt's keys with fitted
  weights and values, fitted on the prompt repeated and the model's own text. ``method="landmark"`` builds on it. New in kvlens: values that make up for the
  error of the weights, fitted to the head's output over prompt and text; budgets that give keys to the heads where they remove most error of the
  logits, to first order; and the result as one object that can be saved, added, subtracted (only then do weights have either sign), and attributed to heads;
- prompts as changes of the weights (`kvlens.conversion.weight_patches`): rank-1 patches of the MLPs for every token (Dherin et al. 2025, arXiv 2507.16003;
  Goldwaser et al. 2025, arXiv 2511.17864), thought vectors and matrices (Mazzawi et al. 2025, arXiv 2510.08734), context distillation (Askell et al.
  2021, arXiv 2112.00861; Snell et al. 2022, arXiv 2209.15189), also with low rank (Hu et al. 2021, arXiv 2106.09685).

Two conventions hold on all pages. **Positions start at 0** here and at 1 in the papers. **Vectors are rows**, as in
TransformerLens: $q = x W_Q + b_Q$. Formulas are for a single head.
"""  # noqa: E501

import importlib

from kvlens.checks import checked
from kvlens.errors import check_known
from kvlens.papers.harness.run import Experiment

EXPERIMENTS = {
    "induction-depth": "kvsa",
    "induction-width": "kvsa",
    "induction-heads": "kvsa",
    "induction-exact": "kvsa",
    "landscape": "kvsa",
    "ngram": "kvsa",
    "hops": "kvsa",
    "arithmetic": "kvsa",
    "variants": "kvsa",
    "learning-rate": "kvsa",
    "scaling": "kvsa",
    "coefficients": "kvsa",
    "conversion-accuracy": "iclca",
    "conversion-error": "iclca",
    "direct-conversion": "iclca",
    "trainable-bias": "iclca",
    "softmax-conversion": "iclca",
    "compaction": "iclca",
    "gpt2-text": "iclca",
    "stored-bias": "iclca",
    "weights-to-prompt": "iclca",
    "function-classes": "lecture",
    "dual-equivalence": "dual",
    "dual-variants": "dual",
    "random-features": "dual",
    "dual-layer": "dual",
    "gradient-descent": "dual",
    "dual-heads": "dual",
    "bert-variants": "dual",
}
"""Name -> the paper, whose package has the module of that name (with underscores), in the order of the papers."""


@checked
def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        KVLensError: no such experiment; the nearest name is proposed.
    """
    check_known("no experiment", name, EXPERIMENTS)
    module = name.replace("-", "_")
    return getattr(importlib.import_module(f"kvlens.papers.{EXPERIMENTS[name]}.{module}"), module)


def all_experiments() -> list[Experiment]:
    """Every experiment, in the order of `EXPERIMENTS`."""
    return [find_experiment(name) for name in EXPERIMENTS]
