"""A batch from beginning to end: check everything, resume an interrupted run, and leave one Parquet file.

    OUT.parquet                 the table; it appears when every prompt is done, whole
    OUT.parquet.partial         what is done so far, while a batch runs or after it was interrupted
    OUT.parquet.errors.jsonl    the lines without a prompt and the prompts without rows, and why, where there are any

A prompt that fails costs its own rows alone; ``retry_failed`` runs those that failed again and keeps the rest. A run that was
killed is resumed by the same call. Rows come by model, then in the order of the prompts, whatever the
number of workers and however often it was interrupted.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from kvlens import KVLensError, __version__
from kvlens.arguments import path_of
from kvlens.checks import checked
from kvlens.files import reason, write_atomically
from kvlens.terminal import visible

from ..declaration import Analysis, Record
from .earlier import FORMAT_VERSION
from .engines import run_jobs
from .journal import Journal, check_same
from .models import ModelShelf
from .places import check_place
from .records import Survey, read_records, survey
from .table import read_facts, read_parquet, schema_of, to_bytes, write_parquet
from .work import Resources, Work, check_work
from .worker import Job, PromptResult, columns_of

MALFORMED = "malformed"
NO_PROMPT = "none"
"""The prompt_id of what was computed without a prompt."""
LINES_SHOWN = 20
"""Bad lines that are listed one by one; all of them are in the errors file."""


@dataclass(frozen=True)
class BatchResult:
    """What a finished batch left.

    Attributes:
        out: the table.
        n_rows: of the table.
        n_prompts: that were read, each of them run on every model.
        n_without_rows: prompts, a model each, that the analysis refused or that failed.
        n_malformed: lines of the input that held no prompt.
        errors: the file that names them all; None where there are none.
        first_failure: of the prompts without rows: which it is, why, and where that was raised.
    """

    out: Path
    n_rows: int
    n_prompts: int
    n_without_rows: int
    n_malformed: int
    errors: Path | None
    first_failure: str | None = None


@checked
@dataclass(frozen=True)
class Input:
    """Where the prompts are, and the text of those that have none of their own. None: an analysis that reads none runs once."""

    prompts: Path | None = None
    text: str | None = None

    def records(self) -> Iterator[tuple[int, Record]]:
        """(place, record) of every prompt, places counted from 0."""
        if self.prompts is None:
            yield 0, Record(NO_PROMPT, "")
            return
        entries = read_records(self.prompts, self.text)
        yield from enumerate(entry for entry in entries if isinstance(entry, Record))

    def survey(self) -> Survey:
        """What there is to read."""
        return Survey(1, (), NO_PROMPT) if self.prompts is None else survey(self.prompts, self.text)


def tell_on_stderr(line: str) -> None:
    """Print a line above the progress bar."""
    tqdm.write(visible(line), file=sys.stderr)


@checked
def run_batch(
    work: Work,
    source: Input,
    out: str | Path,
    *,
    resources: Resources | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: bool | None = None,
    tell: Callable[[str], None] = tell_on_stderr,
) -> BatchResult:
    """Run an analysis over all prompts and models, into one Parquet file with a row group per prompt.

    Args:
        work: which analysis, with which models, columns and options.
        source: the prompts; see :func:`kvlens.analyses.batch.records.read_records`. An analysis of the weights alone reads
            none: it runs once a model.
        out: the table's file, ``.parquet``; folders that are missing are made.
        resources: engine and workers; None works in this process.
        overwrite: start from scratch: forget what an interrupted run has done, and replace the table of an earlier batch in the
            end.
        retry_failed: run the prompts again that failed in an earlier batch of the same settings, and keep the others' rows.
        progress: whether a bar is drawn on stderr; None draws it on a terminal.
        tell: called with a line for each bad line of the input, for the first prompt that fails, and when a worker dies.

    Returns:
        Counts and files. What was interrupted or killed raises or ends; the same call resumes it.

    Raises:
        KVLensError: unknown names, an input without prompts, a model that cannot be loaded or lacks what the analysis needs,
            an output that exists, an earlier run of other settings, a full disk.
    """
    if overwrite and retry_failed:
        raise KVLensError("overwrite computes everything again and retry_failed what failed: give one of them")
    analysis, out = check_work(work), path_of("out", out)
    if analysis.inputs and source.prompts is None:
        raise KVLensError(f"prompts: {analysis.name} needs them: a JSONL file, a text file or a folder")
    if not analysis.inputs and source.prompts is not None:
        tell(f"{analysis.name} reads the weights alone, and runs once a model; {source.prompts} is not read")
        source = Input()
    resources = resources or Resources()
    check_place(out)
    journal_path = out.with_name(f"{out.name}.partial")
    facts = _check_output(out, replace=overwrite or retry_failed or journal_path.exists())
    found = source.survey()
    _tell_bad_lines(found, tell)
    elsewhere = resources.engine == "ray" or resources.workers > 1
    models = ModelShelf(work.models, device="cpu" if elsewhere else work.device, dtype=work.dtype)
    settings = _settings(analysis, work, found, _check_models(analysis, models))
    _tell_interventions(analysis, models, settings["options"], tell)
    if elsewhere:
        del models
    kept = facts if retry_failed else None
    if kept is not None and not journal_path.exists():
        check_same(out, {name: kept.get(name) for name in settings}, json.loads(json.dumps(settings)))
    _make_folder(out.parent)
    with Journal(journal_path, settings, restart=overwrite, retry_failed=retry_failed) as journal:
        if kept is not None and not journal.progress().n_done:
            journal.add(_kept(out, kept, work, source, schema_of(columns_of(analysis, work))))
        total, done = found.n_prompts * len(work.models), journal.progress().n_done
        jobs = _jobs(work, source, journal, resources.prompts_per_job)
        hidden = None if progress is None else not progress
        with tqdm(total=total, initial=done, unit="prompt", desc=analysis.name, disable=hidden) as bar:
            told = False
            for results in run_jobs(jobs, work, resources, tell, None if elsewhere else models):
                journal.add(results)
                bar.update(len(results))
                failed = next((result for result in results if result.kind is not None), None)
                if failed is not None and not told:
                    tell(f"{_described(failed)}; the others go on")
                    told = True
        return _finish(out, journal, work, analysis, settings, found)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVLensError(f"out: cannot make the folder {folder}: {reason(error)}; choose another") from error


def _check_output(out: Path, *, replace: bool) -> dict[str, Any] | None:
    """The facts of the table at that path, None where there is none."""
    if not out.exists():
        return None
    facts = read_facts(out) if out.is_file() else None
    if facts is None:
        raise KVLensError(f"out: {out} exists and is not the table of a batch, so it is left alone; choose another file")
    if replace:
        return facts
    if n_failed := facts.get("n_without_rows"):
        raise KVLensError(
            f"out: {out} is the table of an earlier batch, {facts.get('analysis')} of {facts.get('n_prompts')} prompts; "
            f"{n_failed:,} failed ({_errors_of(out).name} says why): pass --retry-failed to run those again and keep the rest, "
            "--overwrite to compute all again, or choose another file"
        )
    raise KVLensError(
        f"out: {out} is complete: {facts.get('analysis')} of {facts.get('n_prompts')} prompts; pass --overwrite to compute "
        "it again, or choose another file"
    )


def _errors_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.errors.jsonl")


def _kept(out: Path, facts: dict[str, Any], work: Work, source: Input, schema: pa.Schema) -> Iterator[PromptResult]:
    """What the table of an earlier batch holds of every prompt that did not fail, those without a row included."""
    ids = [record.id for _, record in source.records()]
    places, models = ({name: place for place, name in enumerate(names)} for names in (ids, work.models))
    everything = set(product(range(len(models)), range(len(ids))))
    empty = everything - {(model, place) for model, place in facts.get("failed", everything)}
    for name, prompt_id, n_rows, rows in read_parquet(out, schema):
        model, place = models[name], places[prompt_id]
        empty.discard((model, place))
        yield PromptResult(model, place, prompt_id, n_rows, rows)
    none = to_bytes(schema.empty_table().to_pandas(), schema)
    for model, place in empty:
        yield PromptResult(model, place, ids[place], 0, none)


def _described(failed: PromptResult) -> str:
    """``p.jsonl:3: ZeroDivisionError: a bug (letters.py:33)``"""
    where = "" if failed.where is None else f" ({Path(failed.where.split(', called at ')[-1]).name})"
    return f"{failed.prompt_id}: {failed.error}{where}"


def _tell_bad_lines(found: Survey, tell: Callable[[str], None]) -> None:
    for line in found.bad[:LINES_SHOWN]:
        tell(f"{line.where}: {line.problem}")
    if len(found.bad) > LINES_SHOWN:
        tell(f"... and {len(found.bad) - LINES_SHOWN} more lines without a prompt")


def _check_models(analysis: Analysis, models: ModelShelf) -> dict[str, Any]:
    """The fingerprint of every model that has what the analysis needs, by name."""
    fingerprints = {}
    for index, name in enumerate(models.names):
        try:
            analysis.check_model(models[index])
        except KVLensError as error:
            raise KVLensError(f"{analysis.name} cannot be run on {name}: {error}") from error
        fingerprints[name] = models[index].fingerprint().to_json()
    return fingerprints


def _tell_interventions(analysis: Analysis, models: ModelShelf, options: dict[str, Any], tell: Callable[[str], None]) -> None:
    if analysis.n_interventions is None:
        return
    for index, name in enumerate(models.names):
        if number := analysis.n_interventions(models[index], **options):
            tell(f"{name}: {number:,} ablations or patches per prompt, in batches")


def _settings(analysis: Analysis, work: Work, found: Survey, fingerprints: dict[str, Any]) -> dict[str, Any]:
    """Everything that the rows depend on; equal settings give equal rows."""
    return {
        "format_version": FORMAT_VERSION,
        "kvlens": __version__,
        "analysis": analysis.name,
        "options": analysis.read_options(work.options),
        "columns": list(columns_of(analysis, work)),
        "models": fingerprints,
        "order_of_models": list(work.models),
        "dtype": work.dtype,
        "n_prompts": found.n_prompts,
        "prompts": found.sha256,
    }


def _jobs(work: Work, source: Input, journal: Journal, size: int) -> Iterator[Job]:
    """What the journal does not hold yet, model by model, so that a worker loads each model once."""
    for model in range(len(work.models)):
        todo = ((place, record) for place, record in source.records() if not journal.holds(model, place))
        while prompts := tuple(islice(todo, size)):
            yield Job(model, prompts)


def _finish(
    out: Path, journal: Journal, work: Work, analysis: Analysis, settings: dict[str, Any], found: Survey
) -> BatchResult:
    """Write errors, then the table, then forget the journal: a kill in between repeats this and nothing else."""
    progress = journal.progress()
    if progress.n_done != found.n_prompts * len(work.models):
        raise KVLensError("the prompts changed while they were read; run the command again")
    errors, failures = _errors_of(out), list(journal.failures())
    lines = [{"model": None, "prompt": bad.where, "kind": MALFORMED, "error": bad.problem, "where": None} for bad in found.bad]
    for failed in failures:
        where = {"error": failed.error, "where": failed.where}
        lines.append({"model": work.models[failed.model], "prompt": failed.prompt_id, "kind": failed.kind, **where})
    if lines:
        write_atomically(errors, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    else:
        errors.unlink(missing_ok=True)
    counts = {"n_without_rows": progress.n_failed, "n_malformed": len(found.bad)}
    facts = {**settings, **counts, "failed": [(failed.model, failed.prompt) for failed in failures]}
    write_parquet(out, schema_of(columns_of(analysis, work)), journal.tables(), facts)
    journal.delete()
    first = _described(failures[0]) if failures else None
    return BatchResult(
        out, progress.n_rows, found.n_prompts, progress.n_failed, len(found.bad), errors if lines else None, first
    )
