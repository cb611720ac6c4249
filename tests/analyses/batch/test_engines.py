"""Sharing jobs out among workers that die: by hand with some that answer at once, and with real processes."""

import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pandas as pd
import pytest
from kvlens.analyses.batch import workers
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work
from kvlens.analyses.batch.workers import MAX_DEATHS, Job, PromptResult, run_jobs, share_out
from kvlens.analyses.declaration import Record

from kvlens import KVLensError
from kvlens.papers.harness.learned import _start_worker
from kvlens.terminal import end_with_parent

LETTERS = "batch_probes.letters:LETTERS"
LETTERS_FILE = Path(__file__).parents[1] / "batch_probes" / "letters.py"


class Instant:
    """Workers that answer at once, and die as they are told.

    Args:
        dies: whether a worker dies over a job, given how many have died.
        error: what every job raises; None for results.
    """

    def __init__(self, dies=lambda job, deaths: False, error=None):
        self.dies, self.error, self.deaths, self.alive, self.jobs = dies, error, 0, [], []

    def start(self):
        self.alive.append(True)
        return InstantWorker(self, len(self.alive) - 1)


class InstantWorker:
    def __init__(self, engine, number):
        self.engine, self.number = engine, number

    def submit(self, job):
        engine, future = self.engine, Future()
        assert engine.alive[self.number]
        engine.jobs.append(job)
        if engine.error or engine.dies(job, engine.deaths):
            engine.deaths += not engine.error
            future.set_exception(engine.error or RuntimeError("killed by hand"))
        else:
            future.set_result(PromptResult(job.model, job.number, job.record.id))
        return future

    def death(self, error):
        return None if error is self.engine.error else str(error)

    def stop(self):
        assert self.engine.alive[self.number], "stopped twice"
        self.engine.alive[self.number] = False


def jobs(n):
    return [Job(0, number, Record(f"p{number}", "x")) for number in range(n)]


def shared(engine, given, n_workers=3):
    lines = []
    results = list(share_out(given, engine.start, n_workers, lines.append))
    assert not any(engine.alive), "a worker was left running"
    return sorted(results, key=lambda result: result.prompt), lines


def test_every_prompt_once_and_no_more_workers_than_jobs():
    engine = Instant()
    results, lines = shared(engine, jobs(5), n_workers=7)
    assert [o.prompt for o in results] == [0, 1, 2, 3, 4] and not lines
    assert len(engine.alive) == 5
    assert shared(Instant(None), []) == ([], [])


def test_the_job_of_a_dead_worker_is_given_out_again():
    engine = Instant(lambda job, deaths: job.number == 4 and deaths == 0)
    results, lines = shared(engine, jobs(9))
    assert [(o.prompt, o.kind) for o in results] == [(i, None) for i in range(9)]
    assert lines == ["a worker died (killed by hand); another takes over"]
    assert len(engine.alive) == 4
    assert len(engine.jobs) == 10, "the others' jobs are left alone"


def test_a_deadly_prompt_costs_only_itself():
    engine = Instant(lambda job, deaths: job.number in (1, 5))
    results, _ = shared(engine, jobs(9), n_workers=2)
    assert [o.prompt for o in results if o.kind == "died"] == [1, 5]
    assert "its worker died 2 times (killed by hand)" in results[1].error
    assert len(results) == 9
    assert engine.deaths == 2 * MAX_DEATHS


def test_workers_that_always_die_end_the_batch():
    engine = Instant(lambda job, deaths: True)
    with pytest.raises(KVLensError, match="workers died one after the other; of the last: killed by hand"):
        shared(engine, jobs(99), n_workers=2)
    assert not any(engine.alive)


def test_an_error_a_reader_that_leaves_and_prompts_that_fail_stop_every_worker():
    engine = Instant(error=KVLensError("no such model"))
    with pytest.raises(KVLensError, match="no such model"):
        shared(engine, jobs(2))
    assert engine.alive == [False, False]
    engine = Instant()
    results = share_out(jobs(3), engine.start, 3)
    next(results)
    results.close()
    assert engine.alive == [False, False, False]

    def unreadable():
        yield from jobs(2)
        raise KVLensError("cannot read")

    engine = Instant()
    with pytest.raises(KVLensError, match="cannot read"):
        shared(engine, unreadable(), n_workers=2)
    assert engine.alive == [False, False]


# --- real workers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deadly(model_folder, tmp_path_factory):
    """The work of a user's analysis, whose module is in a folder that only the work names; eleven prompts, of which the fifth
    kills the first worker that takes it; the table that this process writes, without a kill."""
    folder = tmp_path_factory.mktemp("mine")
    shutil.copy(LETTERS_FILE, folder / "letters_of_ones_own.py")
    records = [{"id": f"p{i}", "prompt": "abcdefghijk"[: i + 1]} for i in range(11)]
    records[4]["kills_once"] = str(folder / "killed")
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    work, source = Work("letters_of_ones_own:LETTERS", (model_folder,), folder=str(folder)), Input(folder / "p.jsonl")
    (folder / "killed").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        run_batch(work, source, folder / "alone.parquet")
    table = pd.read_parquet(folder / "alone.parquet")
    assert list(table["prompt_id"]) == [f"p{i}" for i in range(11) for _ in range(i + 1)]
    assert "".join(table["letter"]) == "".join("abcdefghijk"[: i + 1] for i in range(11))
    return work, source, (folder / "alone.parquet").read_bytes()


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed(deadly, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (work, source, table), lines = deadly, []
    (source.prompts.parent / "killed").unlink()
    resources = Resources(workers=2, threads=1)
    result = run_batch(work, source, tmp_path / "t.parquet", resources=resources, progress=False, tell=lines.append)
    assert result.errors is None and result.out.read_bytes() == table
    assert lines == ["a worker died (killed by SIGKILL); another takes over"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.slow
def test_a_ray_actor_that_is_killed(deadly, tmp_path):
    """As a user runs it, in a process of its own: Ray starts threads and processes that must not outlive the test."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]' runs this test")
    work, source, table = deadly
    (source.prompts.parent / "killed").unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvlens", "analyse", work.analysis, str(source.prompts), "--model", *work.models]
    command += ["--engine", "ray", "--threads", "1", "--out", str(tmp_path / "t.parquet")]
    run = subprocess.run(command, cwd=source.prompts.parent, timeout=600, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("a worker died") == 1 and (tmp_path / "t.parquet").read_bytes() == table


@pytest.mark.parametrize("start", [end_with_parent, partial(_start_worker, Path(), 1)], ids=["batch", "trainings"])
def test_a_worker_ends_when_its_parent_is_killed(start):
    """By SIGKILL: a worker that stayed would hold its model's memory. Only the worker and the parent can write to the pipe."""
    read, write = os.pipe()
    batch = os.fork()
    if batch == 0:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"), start)
        pool.submit(os.write, write, b"x").result()
        pool.submit(time.sleep, 60)
        time.sleep(60)
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.kill(batch, signal.SIGKILL)
    os.waitpid(batch, 0)
    assert select.select([read], [], [], 30)[0] == [read] and os.read(read, 1) == b""
    os.close(read)


def test_a_batch_on_ray_goes_on_with_actors_that_answered_and_ends_where_its_daemon_died(monkeypatch):
    """A stand-in for Ray with two actors: one answers, the other never does, since this machine's daemon died."""
    ray, here, answers = MagicMock(), {"NodeID": "here", "Alive": True}, [Future(), Future()]
    ray.get_runtime_context().get_node_id.return_value = "here"
    ray.nodes.side_effect = lambda: [here, {"NodeID": "there", "Alive": False}]
    ray.remote.return_value.return_value.remote.return_value.run.remote.return_value.future.side_effect = answers
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(workers, "PATIENCE", 0.001)
    answers[1].set_result(PromptResult(0, 1, "p1"))
    results = run_jobs(jobs(2), Work(LETTERS, ("m",)), {}, Resources("ray", 2, threads=1))
    assert next(results).prompt_id == "p1"
    here["Alive"] = False
    with pytest.raises(KVLensError, match="daemon on this machine died; finished prompts are kept"):
        next(results)
    assert ray.kill.call_count == 2


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KVLensError, match=r"pip install -e '.\[ray\]'"):
        list(run_jobs([], Work(LETTERS, ("m",)), {}, Resources(engine="ray")))
