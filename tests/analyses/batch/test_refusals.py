"""What a batch refuses before it starts, and its words."""

import functools
import math
from pathlib import Path

import pytest
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

LETTERS = "batch_probes.letters:LETTERS"
WORK = [
    ("no analysis is called 'bias_by_haed'", dict(analysis="bias_by_haed")),
    ("did you mean 'bias_by_head'", dict(analysis="bias_by_haed")),
    ("there is no module 'batch_probes.lettres'", dict(analysis="batch_probes.lettres:LETTERS")),
    (
        "'ANALYSIS' of 'os.path' is no function with the decorator",
        dict(analysis="os.path:ANALYSIS"),
    ),
    ("it has LETTERS; did you mean 'LETTERS'", dict(analysis="batch_probes.letters:LETERS")),
    ("expected MODULE:FUNCTION", dict(analysis=".letters:LETTERS")),
    ("expected MODULE:FUNCTION", dict(analysis="batch_probes.letters:")),
    ("letters has no column 'leter'; it has place, letter, layers; did you mean 'letter'", dict(columns=("leter",))),
    ("the column 'place' is given twice", dict(columns=("place", "place"))),
    ("letters has no option 'uper'; it has upper, times; did you mean 'upper'", dict(options={"uper": True})),
    ("times must be a whole number, got True", dict(options={"times": True})),
    ("the model 'm' is given twice", dict(models=("m", "m"))),
    ("no model is given; name at least one", dict(models=())),
    ("did you mean 'docs-linear'", dict(models=("docs-liner",))),
    ("Work: models must be a tuple", dict(models="docs-linear")),
    ("Work: columns must be a tuple", dict(columns="layer")),
    ("Work: options must be a dict", dict(options=["x"])),
    ("dtype must be one of float32, float64, bfloat16, float16, got 'int8'", dict(dtype="int8")),
    ("device: 'meta' cannot be used here", dict(device="meta")),
    ("device: 'abacus' cannot be used here", dict(device="abacus")),
    ("folder: expected a path", dict(folder="a\0b")),
    ("folder: 'nowhere' is not a folder; give the one with the module of the analysis", dict(folder="nowhere")),
    ("prompts: letters needs them: a JSONL file, a text file or a folder", dict(prompts=None)),
    *(("prompts: expected a path", dict(prompts=x)) for x in (3, "", "a\0b")),
    ("prompts: cannot read nowhere: No such file or directory", dict(prompts="nowhere")),
]
RESOURCES = [
    ("engine must be one of processes, ray, got 'rays'; did you mean 'ray'", dict(engine="rays")),
    ("workers must be at least 1, got 0", dict(workers=0)),
    ("workers must be a whole number of at least 1, got True", dict(workers=True)),
    ("workers: at most", dict(workers=10**9)),
    ("threads must be at least 1", dict(threads=-1)),
    ("threads: at most", dict(threads=10**9)),
    ("prompts_per_job must be at least 1", dict(prompts_per_job=0)),
    ("gpus_per_worker must be at least 0, got -1", dict(gpus_per_worker=-1)),
    ("gpus_per_worker must be a number of at least 0, got nan", dict(gpus_per_worker=math.nan, engine="ray")),
    ("gpus_per_worker is for the engine ray; for processes, choose the device", dict(gpus_per_worker=0.5)),
]


def batch(**given):
    source = Input(given.pop("prompts", Path(__file__)))
    return run_batch(Work(**{"analysis": LETTERS, "models": ("docs-linear",), **given}), source, "out.parquet")


REFUSED = [
    *((words, functools.partial(batch, **given)) for words, given in WORK),
    *((words, functools.partial(Resources, **given)) for words, given in RESOURCES),
    ("Input: text must be a string or None, got 3", lambda: Input("p.jsonl", 3)),
]


@pytest.mark.filterwarnings("ignore")  # the prompts of this file are none
@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
