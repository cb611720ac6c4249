"""A batch from beginning to end: check everything, resume an interrupted run, and leave one Parquet file.

    OUT.parquet                 the complete table, written when every prompt is done
    OUT.parquet.partial/        a part for each finished prompt, while a batch runs or after it was interrupted
    OUT.parquet.errors.jsonl    the lines without a prompt and the prompts without rows, and why, if there are any

A prompt that fails only loses its own rows; ``retry_failed`` runs the failed ones again and keeps the rest. A run that was
killed loses only the prompt it was at (each worker, its own), and is resumed by the same call. Rows are ordered by model, then
prompt, whatever the number of workers and interruptions.
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvlens import KVLensError, __version__
from kvlens.arguments import path_of
from kvlens.checks import checked
from kvlens.files import work_on, write_atomically
from kvlens.terminal import is_new, visible

from ..declaration import Analysis, Record
from ..registry import check_front_end
from .parts import (
    PARTS,
    Parts,
    PromptResult,
    check_same,
    folder_of_parts,
    is_started,
    read_facts,
    read_row_groups,
    schema_of,
    write_table,
)
from .records import Survey, read_records, survey
from .work import Resources, Work, check_table_path, check_work, code_of, columns_of
from .workers import Job, ModelShelf, run_jobs

FORMAT_VERSION = 3
MALFORMED = "malformed"
NO_PROMPT = "none"
"""The prompt_id of rows computed without a prompt."""
LINES_SHOWN = 20
"""The most bad lines that are listed one by one; the errors file has all of them."""
SECONDS_BETWEEN_LINES = 30
"""The fewest between lines about the progress; later on they are further apart, a tenth of the time so far."""


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
    check_table_path(out)
    folder = folder_of_parts(out)
    with work_on(folder, PARTS):
        facts = _check_output(out, replace=overwrite or retry_failed or is_started(folder))
        found = source.survey([each.name for each in analysis.inputs.values()])
        _tell_bad_lines(found, tell)
        plan = Plan(work, analysis, source, found, resources or Resources())
        known = plan.kept(out, facts) if retry_failed and facts is not None else ()
        parts = Parts(folder, plan.settings, plan.schema, restart=overwrite, retry_failed=retry_failed, known=known)
        for path in parts.damaged:
            tell(f"{path} is damaged; its prompt is run again")
        plan.run(parts, tell, progress)
        return _finish(out, parts, plan)


class Plan:
    """What a batch runs, with its models checked.

    Attributes:
        work, analysis, source, found, resources: what is asked for, and the survey of the prompts.
        n_runs: number of prompts times models.
        schema: of the table.
        settings: everything that the rows depend on, as JSON values; equal settings give equal rows.

    Raises:
        KVLensError: a model cannot be loaded or lacks what the analysis needs, or a field has the name of another column.
    """

    def __init__(self, work: Work, analysis: Analysis, source: Input, found: Survey, resources: Resources):
        self.work, self.analysis, self.source, self.found, self.resources = work, analysis, source, found, resources
        self.n_runs = found.n_prompts * len(work.models)
        columns = columns_of(analysis, found.own_fields)
        self.schema = schema_of(columns)
        elsewhere = resources.engine == "ray" or resources.workers > 1
        models = ModelShelf(work.models, device="cpu" if elsewhere else work.device, dtype=work.dtype)
        settings = _settings(analysis, work, found, columns, _check_models(analysis, models))
        self.settings = json.loads(json.dumps(settings))
        self.models = None if elsewhere else models

    def jobs(self) -> Iterator[Job]:
        """Every prompt on every model, model by model, so that a worker loads each model once."""
        for model in range(len(self.work.models)):
            for number, record in self.source.records():
                yield Job(model, number, record)

    def kept(self, out: Path, facts: dict[str, Any]) -> Iterator[PromptResult]:
        """The results in the table of an earlier batch for every prompt that did not fail, including those without rows.

        Raises:
            KVLensError: it was computed with other settings, or cannot be read.
        """
        check_same(out, {name: facts.get(name) for name in self.settings}, self.settings)
        groups, failed = read_row_groups(out, self.schema), set(map(tuple, facts["failed"]))
        rows = next(groups, None)
        for job in self.jobs():
            place = self.work.models[job.model], job.record.id
            if rows is not None and place == (rows["model"][0].as_py(), rows["prompt_id"][0].as_py()):
                yield PromptResult(job.model, job.number, job.record.id, rows.num_rows, rows=rows)
                rows = next(groups, None)
            elif (job.model, job.number) not in failed:
                yield PromptResult(job.model, job.number, job.record.id, rows=self.schema.empty_table())

    def run(self, parts: Parts, tell: Callable[[str], None], progress: bool | None) -> None:
        """Run the prompts that have no part yet; tell each warning once, and the first prompt that fails."""
        told, reported = set[str](), False
        jobs = (job for job in self.jobs() if (job.model, job.number) not in parts.done)
        results = run_jobs(jobs, self.work, self.found.own_fields, self.resources, tell, self.models)
        for result in _with_progress(results, self, parts, tell, progress):
            parts.add(result)
            for text in result.warnings:
                if is_new(text, told):
                    tell(f"warning: {text}")
            if result.kind is not None and not reported:
                tell(f"{_described(result)}; the batch continues with the others")
                reported = True


def _with_progress(
    results: Iterable[PromptResult], plan: Plan, parts: Parts, tell: Callable[[str], None], shown: bool | None
) -> Iterator[PromptResult]:
    """Pass results on, and show how far they are: by a bar on a terminal; elsewhere by lines, as for a script's log."""
    name, total, found, began = plan.analysis.name, plan.n_runs, len(parts.done), time.monotonic()
    if found and shown is not False:
        tell(f"{found:,} of {total:,} already done, in {parts.folder.name}; {total - found:,} to run")
    has_bar, last = sys.stderr.isatty() if shown is None else shown, began
    with tqdm(total=total, initial=found, unit="prompt", desc=name, disable=not has_bar) as bar:
        for result in results:
            yield result
            bar.update()
            now, done = time.monotonic(), len(parts.done)
            if shown is None and not has_bar and now - last >= max(SECONDS_BETWEEN_LINES, 0.1 * (now - began)):
                failed = f", {n:,} failed" if (n := len(parts.failures)) else ""
                left = tqdm.format_interval((now - began) / (done - found) * (total - done))
                tell(f"{name}: {done:,} of {total:,}{failed}; about {left} left")
                last = now


def _check_output(out: Path, *, replace: bool) -> dict[str, object] | None:
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


def _described(failed: PromptResult) -> str:
    """``p.jsonl:3: ZeroDivisionError: a bug (letters.py:33)``"""
    where = "" if failed.where is None else f" ({Path(failed.where.split(', called at ')[-1]).name})"
    return f"{failed.prompt_id}: {failed.error}{where}"


def _tell_bad_lines(found: Survey, tell: Callable[[str], None]) -> None:
    for line in found.bad[:LINES_SHOWN]:
        tell(f"{line.where}: {line.problem}")
    if len(found.bad) > LINES_SHOWN:
        tell(f"... and {len(found.bad) - LINES_SHOWN} more lines without a prompt")


def _check_models(analysis: Analysis, models: ModelShelf) -> dict[str, dict[str, object]]:
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


def _settings(
    analysis: Analysis, work: Work, found: Survey, columns: dict[str, str], fingerprints: dict[str, dict[str, object]]
) -> dict[str, object]:
    return {
        "format_version": FORMAT_VERSION,
        "kvlens": __version__,
        "analysis": analysis.name,
        "code": code_of(work.analysis),
        "options": analysis.read_options(work.options),
        "columns": list(columns),
        "models": fingerprints,
        "order_of_models": list(work.models),
        "dtype": work.dtype,
        "n_prompts": found.n_prompts,
        "prompts": found.sha256,
    }


def _finish(out: Path, parts: Parts, plan: Plan) -> BatchResult:
    """Write the errors, then the table, then delete the parts; after a kill in between only this is repeated."""
    if len(parts.done) != plan.n_runs:
        raise KVLensError("the prompts changed while they were read; run the command again")
    errors, failures, bad = _errors_of(out), parts.failures, plan.found.bad
    lines = [{"model": None, "prompt": line.where, "kind": MALFORMED, "error": line.problem, "where": None} for line in bad]
    for failed in failures:
        where = {"error": failed.error, "where": failed.where}
        lines.append({"model": plan.work.models[failed.model], "prompt": failed.prompt_id, "kind": failed.kind, **where})
    if lines:
        write_atomically(errors, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    else:
        errors.unlink(missing_ok=True)
    counts = {"n_without_rows": len(failures), "n_malformed": len(bad)}
    facts = {**plan.settings, **counts, "failed": [(failed.model, failed.prompt) for failed in failures]}
    write_table(out, plan.schema, parts.tables(), facts)
    parts.delete()
    return BatchResult(
        out,
        sum(result.n_rows for result in parts.done.values()),
        plan.found.n_prompts,
        len(failures),
        len(bad),
        errors if lines else None,
        _described(failures[0]) if failures else None,
    )
