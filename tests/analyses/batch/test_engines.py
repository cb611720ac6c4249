"""Sharing jobs out among workers that die: by hand with an engine of none but lists, and with real processes."""

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from kvlens.analyses.batch.engine import WorkerDied
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.sharing import MAX_DEATHS, share_out
from kvlens.analyses.batch.work import Resources, Work
from kvlens.analyses.batch.worker import Job, PromptResult
from kvlens.analyses.declaration import Record
from tiny_text_model import tiny_text_model

from kvlens import KVLensError

LETTERS = "batch_probes.letters:LETTERS"
LETTERS_FILE = Path(__file__).parents[1] / "batch_probes" / "letters.py"


class ListEngine:
    """Workers are lists of pending answers; those that are to die do so when their answer is collected.

    Args:
        dies: whether a worker dies over a job (None: as it starts), given how many have died.
    """

    def __init__(self, dies):
        self.dies, self.deaths, self.alive, self.started, self.jobs = dies, 0, [], 0, []

    def start(self):
        self.alive.append([None])
        self.started += 1
        return self.started, len(self.alive) - 1

    def submit(self, worker, job):
        assert self.alive[worker[1]] is not None and self.alive[worker[1]] == []
        self.alive[worker[1]].append(job)
        self.jobs.append(job)

    def wait(self, workers):
        return workers[-1:]  # the latest first: an order that no real engine would have

    def collect(self, worker):
        job = self.alive[worker[1]].pop()
        if self.dies(job, self.deaths):
            self.deaths += 1
            raise WorkerDied("killed by hand")
        return [PromptResult(job.model, place, record.id, rows=b"") for place, record in job.prompts] if job else []

    def stop(self, worker):
        assert self.alive[worker[1]] is not None, "stopped twice"
        self.alive[worker[1]] = None


def jobs(*sizes):
    """Jobs of the given numbers of prompts, numbered 0, 1, 2 ..."""
    places = iter(range(sum(sizes)))
    return [Job(0, tuple((place, Record(f"p{place}", "x")) for place in islice(places, size))) for size in sizes]


def shared(engine, given, n_workers=3):
    lines = []
    results = [result for part in share_out(given, engine, n_workers, lines.append) for result in part]
    assert all(worker is None for worker in engine.alive), "a worker was left running"
    return sorted(results, key=lambda result: result.prompt), lines


def holds(job, *places):
    return job is not None and any(place in places for place, _ in job.prompts)


def test_every_prompt_once_and_no_more_workers_than_jobs():
    engine = ListEngine(lambda job, deaths: False)
    results, lines = shared(engine, jobs(2, 2, 1), n_workers=7)
    assert [o.prompt for o in results] == [0, 1, 2, 3, 4] and not lines
    assert engine.started == 3
    assert shared(ListEngine(None), []) == ([], [])


def test_the_job_of_a_dead_worker_is_given_out_again():
    engine = ListEngine(lambda job, deaths: holds(job, 4) and deaths == 0)
    results, lines = shared(engine, jobs(3, 3, 3))
    assert [(o.prompt, o.kind) for o in results] == [(i, None) for i in range(9)]
    assert lines == ["a worker died (killed by hand); another takes over"]
    assert engine.started == 4
    assert sum(holds(job, 0) for job in engine.jobs) == 1, "the others' jobs are left alone"


def test_a_deadly_prompt_costs_only_itself():
    engine = ListEngine(lambda job, deaths: holds(job, 1, 5))
    results, _ = shared(engine, jobs(3, 3, 3), n_workers=2)
    assert [o.prompt for o in results if o.kind == "died"] == [1, 5]
    assert "its worker died 2 times (killed by hand)" in results[1].error
    assert len(results) == 9
    assert engine.deaths == 2 * (1 + MAX_DEATHS)


@pytest.mark.parametrize("when", ["starting", "working"])
def test_workers_that_always_die_end_the_batch(when):
    engine = ListEngine(lambda job, deaths: (job is None) == (when == "starting"))
    with pytest.raises(KVLensError, match="workers died one after the other; of the last: killed by hand"):
        shared(engine, jobs(*[1] * 99), n_workers=2)
    assert all(worker is None for worker in engine.alive)


def test_an_error_and_a_reader_that_leaves_stop_every_worker():
    class Refusing(ListEngine):
        def collect(self, worker):
            if super().collect(worker):
                raise KVLensError("no such model")
            return []

    engine = Refusing(lambda job, deaths: False)
    with pytest.raises(KVLensError, match="no such model"):
        shared(engine, jobs(1, 1))
    assert engine.alive == [None, None]
    engine = ListEngine(lambda job, deaths: False)
    results = share_out(jobs(1, 1, 1), engine, 3)
    next(results)
    results.close()
    assert engine.alive == [None, None, None]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_text_model().save(folder)
    return str(folder)


def deadly_prompts(tmp_path):
    """Eleven prompts, of which the fifth kills the first worker that takes it."""
    records = [{"id": f"p{i}", "prompt": "abcdefghijk"[: i + 1]} for i in range(11)]
    records[4]["kills_once"] = str(tmp_path / "killed")
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return Input(path)


def check_deadly_prompts(out, lines):
    assert len(lines) == 1 and "a worker died" in lines[0]
    table = pd.read_parquet(out)
    assert list(table["prompt_id"]) == [f"p{i}" for i in range(11) for _ in range(i + 1)]
    assert "".join(table["letter"]) == "".join("abcdefghijk"[: i + 1] for i in range(11))
    assert not list(out.parent.glob("*.partial*"))


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed(model_folder, tmp_path, monkeypatch):
    """The analysis is a user's: its module is in a folder that only the work names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(LETTERS_FILE, mine / "letters_of_ones_own.py")
    work, lines = Work("letters_of_ones_own:LETTERS", (model_folder,), folder=str(mine)), []
    out = tmp_path / "t.parquet"
    resources = Resources(workers=2, threads=1, prompts_per_job=3)
    source = deadly_prompts(tmp_path)
    result = run_batch(work, source, out, resources=resources, tell=lines.append)
    assert result.errors is None and result.n_rows == 66
    check_deadly_prompts(out, lines)
    assert "killed by SIGKILL" in lines[0]
    alone = run_batch(work, source, tmp_path / "alone.parquet")
    assert alone.out.read_bytes() == out.read_bytes()


@pytest.mark.slow
def test_two_ray_actors_of_which_one_is_killed(model_folder, tmp_path):
    """As a user runs it, in a process of its own: Ray starts threads and processes that must not outlive the test."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]' runs this test")
    shutil.copy(LETTERS_FILE, tmp_path / "letters_of_ones_own.py")
    source = deadly_prompts(tmp_path)
    command = [sys.executable, "-m", "kvlens", "analyse", "letters_of_ones_own:LETTERS", str(source.prompts)]
    command += ["--model", str(model_folder), "--prompts-per-job", "3"]
    two_actors = ["--engine", "ray", "--workers", "2", "--threads", "1", "--out", "t.parquet"]
    run = subprocess.run([*command, *two_actors], cwd=tmp_path, timeout=600, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    check_deadly_prompts(tmp_path / "t.parquet", [line for line in run.stderr.splitlines() if "a worker died" in line])
    subprocess.run([*command, "--out", "alone.parquet"], cwd=tmp_path, timeout=600, check=True, capture_output=True)
    assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "t.parquet").read_bytes()


def test_without_ray_it_says_what_to_install(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(KVLensError, match=r"pip install -e '.\[ray\]'"):
        run_batch(
            Work(LETTERS, (model_folder,)), deadly_prompts(tmp_path), tmp_path / "t.parquet", resources=Resources(engine="ray")
        )
