"""A batch from beginning to end: check everything, resume an interrupted run, and leave one Parquet file.

    OUT.parquet                 the complete table, written when every prompt is done
    OUT.parquet.partial         the results so far, while a batch runs or after it was interrupted
    OUT.parquet.errors.jsonl    the lines without a prompt and the prompts without rows, and why, if there are any

A prompt that fails only loses its own rows; ``retry_failed`` runs the failed ones again and keeps the rest. A run that was
killed is resumed by the same call. Rows are ordered by model, then prompt, whatever the number of workers and interruptions.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterator
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
from kvlens.terminal import is_new, visible

from ..declaration import Analysis, Record
from ..registry import check_front_end
from .journal import Journal, PromptResult, check_same, read_facts, read_parquet, schema_of, to_bytes, write_parquet
from .records import Survey, read_records, survey
from .work import Resources, Work, check_table_path, check_work
from .workers import Job, ModelShelf, columns_of, run_jobs

FORMAT_VERSION = 2
MALFORMED = "malformed"
NO_PROMPT = "none"
"""The prompt_id of rows computed without a prompt."""
LINES_SHOWN = 20
"""The most bad lines that are listed one by one; the errors file has all of them."""


@dataclass(frozen=True)
class BatchResult:
    """The files and counts of a finished batch.

    Attributes:
        out: the table.
        n_rows: number of rows of the table.
        n_prompts: number of prompts read; each is run on every model.
        n_without_rows: number of runs of a prompt on a model that the analysis refused or that failed.
        n_malformed: lines of the input without a valid prompt.
        errors: the file that lists both; None if there are none.
        first_failure: the first prompt without rows: its id, the reason, and where the error was raised.
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
    """The path of the prompts, None for an analysis that reads none and runs once, and the text for prompts without one."""

    prompts: Path | None = None
    text: str | None = None

    def records(self) -> Iterator[tuple[int, Record]]:
        """(number, record) of every prompt, counted from 0."""
        if self.prompts is None:
            yield 0, Record(NO_PROMPT, "")
            return
        entries = read_records(self.prompts, self.text)
        yield from enumerate(entry for entry in entries if isinstance(entry, Record))

    def survey(self, fields: Collection[str] = ()) -> Survey:
        """Survey the input of an analysis that reads these ``fields`` of a record."""
        return Survey(1, (), NO_PROMPT) if self.prompts is None else survey(self.prompts, self.text, fields)


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
            none, and runs once per model.
        out: the table's file, ``.parquet``; missing folders are created.
        resources: engine and workers; None runs in this process.
        overwrite: start from scratch: discard the results of an interrupted run, and finally replace the table of an earlier
            batch.
        retry_failed: run the prompts that failed in an earlier batch of the same settings again, and keep the others' rows.
        progress: whether to show a progress bar on stderr; None shows it on a terminal.
        tell: called with a message for each bad line of the input, for the first prompt that fails, and when a worker dies.

    Returns:
        Counts and files. An interrupted call raises; calling again with the same arguments resumes it.

    Raises:
        KVLensError: unknown names, an input without prompts, a model that cannot be loaded or lacks what the analysis needs,
            an output that exists, an earlier run of other settings, a full disk.
    """
    if overwrite and retry_failed:
        raise KVLensError("overwrite computes everything again, retry_failed only what failed: give one of them")
    analysis, out = check_work(work), path_of("out", out)
    if analysis.inputs and source.prompts is None:
        raise KVLensError(f"prompts: {analysis.name} needs them: a JSONL file, a text file or a folder")
    if not analysis.inputs and source.prompts is not None:
        tell(f"{analysis.name} reads the weights alone, and runs once per model; {source.prompts} is not read")
        source = Input()
    resources = resources or Resources()
    check_table_path(out)
    journal_path = out.with_name(f"{out.name}.partial")
    facts = _check_output(out, replace=overwrite or retry_failed or journal_path.exists())
    found = source.survey([field.name for field in analysis.inputs.values()])
    _tell_bad_lines(found, tell)
    elsewhere = resources.engine == "ray" or resources.workers > 1
    models = ModelShelf(work.models, device="cpu" if elsewhere else work.device, dtype=work.dtype)
    settings = _settings(analysis, work, found, _check_models(analysis, models))
    if elsewhere:
        del models
    kept = facts if retry_failed else None
    if kept is not None and not journal_path.exists():
        check_same(out, {name: kept.get(name) for name in settings}, json.loads(json.dumps(settings)))
    _make_folder(out.parent)
    known = () if kept is None else _kept(out, kept, work, source, schema_of(columns_of(analysis)))
    with Journal(journal_path, settings, restart=overwrite, retry_failed=retry_failed, known=known) as journal:
        total, done = found.n_prompts * len(work.models), journal.progress().n_done
        jobs = _jobs(work, source, journal, resources.prompts_per_job)
        hidden = None if progress is None else not progress
        with tqdm(total=total, initial=done, unit="prompt", desc=analysis.name, disable=hidden) as bar:
            reported, told = False, set[str]()
            for results in run_jobs(jobs, work, resources, tell, None if elsewhere else models):
                journal.add(results)
                bar.update(len(results))
                for text in (text for result in results for text in result.warnings):
                    if is_new(text, told):
                        tell(f"warning: {text}")
                failed = next((result for result in results if result.kind is not None), None)
                if failed is not None and not reported:
                    tell(f"{_described(failed)}; the batch continues with the others")
                    reported = True
        return _finish(out, journal, work, analysis, settings, found)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVLensError(f"out: cannot make the folder {folder}: {reason(error)}; choose another") from error


def _check_output(out: Path, *, replace: bool) -> dict[str, Any] | None:
    """The facts of the table at that path, None if there is none."""
    if not out.exists():
        return None
    facts = read_facts(out) if out.is_file() else None
    if facts is None:
        raise KVLensError(f"out: {out} exists and is not the table of a batch, so it is not replaced; choose another file")
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
    """The results in the table of an earlier batch for every prompt that did not fail, including those without rows."""
    ids = [record.id for _, record in source.records()]
    prompts, models = ({name: i for i, name in enumerate(names)} for names in (ids, work.models))
    everything = set(product(range(len(models)), range(len(ids))))
    empty = everything - {(model, prompt) for model, prompt in facts.get("failed", everything)}
    for name, prompt_id, n_rows, rows in read_parquet(out, schema):
        model, prompt = models[name], prompts[prompt_id]
        empty.discard((model, prompt))
        yield PromptResult(model, prompt, prompt_id, n_rows, rows)
    none = to_bytes(schema.empty_table().to_pandas(), schema)
    for model, prompt in empty:
        yield PromptResult(model, prompt, ids[prompt], 0, none)


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
            check_front_end(analysis.name, models[index])
            analysis.check_model(models[index])
        except KVLensError as error:
            raise KVLensError(f"{analysis.name} cannot be run on {name}: {error}") from error
        fingerprints[name] = models[index].fingerprint().to_json()
    return fingerprints


def _settings(analysis: Analysis, work: Work, found: Survey, fingerprints: dict[str, Any]) -> dict[str, Any]:
    """Everything that the rows depend on; equal settings give equal rows."""
    return {
        "format_version": FORMAT_VERSION,
        "kvlens": __version__,
        "analysis": analysis.name,
        "options": analysis.read_options(work.options),
        "columns": list(columns_of(analysis)),
        "models": fingerprints,
        "order_of_models": list(work.models),
        "dtype": work.dtype,
        "n_prompts": found.n_prompts,
        "prompts": found.sha256,
    }


def _jobs(work: Work, source: Input, journal: Journal, size: int) -> Iterator[Job]:
    """The jobs that the journal does not have yet, model by model, so that a worker loads each model once."""
    for model in range(len(work.models)):
        todo = ((number, record) for number, record in source.records() if not journal.holds(model, number))
        while prompts := tuple(islice(todo, size)):
            yield Job(model, prompts)


def _finish(
    out: Path, journal: Journal, work: Work, analysis: Analysis, settings: dict[str, Any], found: Survey
) -> BatchResult:
    """Write the errors, then the table, then delete the journal; after a kill in between only this is repeated."""
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
    write_parquet(out, schema_of(columns_of(analysis)), journal.tables(), facts)
    journal.delete()
    first = _described(failures[0]) if failures else None
    return BatchResult(
        out, progress.n_rows, found.n_prompts, progress.n_failed, len(found.bad), errors if lines else None, first
    )
