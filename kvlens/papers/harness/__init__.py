"""What the experiments of all papers share: declaring and writing them, training, significance, and the look of figures.

**An experiment.** An experiment is a module in `kvlens/papers/PAPER` that reads from top to bottom: settings, run, tables,
claims, figure. It has a function of its own name, declared by the decorator `experiment`: a question, what a run costs and the
settings, at the scales tiny and small, and paper once it was run at that. A tuple holds a setting's values at the scales,
everything else is the same at all. The function takes the settings of one scale and returns tables, what draws the figure,
comparisons, and the differences from the paper. Verdicts come from the significance test in
`kvlens.papers.harness.significance`, applied to one value per seed. A number that is not a test of any claim is reported
without a verdict (`Comparison.stated`).

`train_cells` trains every model of every cell with every seed; runs are kept by what they are, so that the command resumes and
shares them. Claims are tested by `lead`, seed by seed, where `Goal` finds that the models have learned enough. Curves begin
after the first `eval_every` steps, not before training. When a change makes equal settings train to other numbers, beyond
rounding, raise `ARITHMETIC` in `kvlens/training/checkpoint.py`; a test reminds of it.

```python
from functools import partial

from kvlens.papers.harness.learned import Cell, Goal, last_heldout, lead, of_heldout, train_cells
from kvlens.papers.harness.plots import PLAIN_COLOR, SHIFTED_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, experiment
from kvlens.tasks import make_task


@experiment(
    "KVSA fig. 1",
    "Does the shift help one layer to learn induction?",
    cost=("a second", "minutes on one core"),
    lengths=([16, 32], [16, 32, 64]),
    rates=([1e-2], [3e-3, 1e-2]),
    seeds=([0, 1], [0, 1, 2, 3, 4, 5]),
    training=dict(steps=(4, 1000), eval_every=(2, 100)),
)
def shift_by_length(settings, tell):
    '''Train both models at every length, and compare them at each.'''
    curves, _ = train_cells(cells(settings), settings, tell)
    final = last_heldout(curves, by=("length", "model", "seed"))
    colors = {"shift": SHIFTED_COLOR, "plain": PLAIN_COLOR}
    figure = partial(draw_panels, final, "length", title="Induction with one layer", colors=colors)
    return Reproduction({"curves": curves, "final": final}, figure, [*compare(final, of_heldout(curves))])


def cells(settings):
    '''One cell per text length; each trains both models.'''
    size = dict(n_layers=1, d_model=32)
    for length in settings["lengths"]:
        yield Cell(
            task := make_task("induction", vocab_size=16, length=length),
            models={"plain": size, "shift": {**size, "kv_shift": True}},
            columns={"length": length, "chance": task.chance},  # added to the rows of this cell
        )


def compare(final, curves):
    '''At each length, unless the plain model has learned too little there.'''
    for length, rows in final.groupby("length"):
        what = f"accuracy with the shift minus without, length {length}"
        goal = Goal(rows["chance"].iloc[0], best=1.0, y="accuracy")
        why = goal.why_untrained(curves[curves["length"] == length], "plain")
        yield lead(rows, "shift", "plain", "accuracy", what, "the shift helps").unless(why)


found = shift_by_length.run(shift_by_length.scales["tiny"], print)
assert set(found.tables["final"]["model"]) == {"plain", "shift"} and len(found.tables["final"]) == 2 * 2 * 2
assert all(comparison.holds is None for comparison in found.comparisons)  # two seeds are too few for a verdict
```

To add it to kvlens itself: its name in `kvlens/papers/__init__.py`, which adds the command `kvlens reproduce shift-by-length`,
and on the paper's page, a `Case` in `tests/papers/test_null.py` (what its comparisons make of noise, and of a known
difference), and tests of its claims on made-up runs beside the others in `tests/papers`. `test_all_experiments.py` runs it at
scale tiny by itself, and fails where a claim that it prints is on no paper's list (`claims.txt` of its
package). The list says what form ran, or why none did. Verdicts and figures are not typed: `kvlens/papers/paper_claims.py`
stores a run and makes `CLAIMS.md` from it, and `tests/test_papers.py` compares.
"""
