"""Sharing jobs out among workers that die: by hand with an engine of none but lists, and with real processes."""

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import pandas as pd
import pytest
from kvlens.analyses.batch.engines import run_jobs
from kvlens.analyses.batch.ray_engine import RayEngine
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.sharing import MAX_DEATHS, WorkerDied, share_out
from kvlens.analyses.batch.work import Resources, Work
from kvlens.analyses.batch.worker import Job, PromptResult
from kvlens.analyses.declaration import Record

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
    resources = Resources(workers=2, threads=1, prompts_per_job=3)
    result = run_batch(work, source, tmp_path / "t.parquet", resources=resources, tell=lines.append)
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
    command += ["--engine", "ray", "--threads", "1", "--prompts-per-job", "3", "--out", str(tmp_path / "t.parquet")]
    run = subprocess.run(command, cwd=source.prompts.parent, timeout=600, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("a worker died") == 1 and (tmp_path / "t.parquet").read_bytes() == table


def test_a_batch_on_ray_goes_on_with_actors_that_answered_and_ends_where_its_daemon_died(monkeypatch):
    """A stand-in for Ray with two actors: the second answers after a while, then none, since this machine's daemon died."""
    ray, here = MagicMock(), {"NodeID": "here", "Alive": True}
    ray.get_runtime_context().get_node_id.return_value = "here"
    ray.nodes.return_value = [here, {"NodeID": "there", "Alive": False}]
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = RayEngine(Work(LETTERS, ("m",)), threads=1, gpus=0.0)
    first, second = engine.start(), engine.start()
    first.answer, second.answer = "a", "b"
    ray.wait.side_effect = [([], ["a", "b"]), (["b"], ["a"]), ([], ["a"])]
    assert engine.wait([first, second]) == [second]
    here["Alive"] = False
    with pytest.raises(KVLensError, match="daemon on this machine died; finished prompts are kept"):
        engine.wait([first])


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KVLensError, match=r"pip install -e '.\[ray\]'"):
        list(run_jobs([], Work(LETTERS, ("m",)), Resources(engine="ray")))
