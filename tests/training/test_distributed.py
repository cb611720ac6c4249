"""Two processes on one run: the same batches, the same results up to the order of the sums, one of them writes."""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from tiny_runs import run, tiny_model, weights

from kvlens import KVLensError
from kvlens.training.distributed import Workers, process_group


def _work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    model = tiny_model()
    with process_group():
        result = run(model, folder=os.path.join(folder, "run"))
    torch.save({"weights": weights(model), "loss": torch.tensor(result.metrics["loss"])}, os.path.join(folder, f"{rank}.pt"))


def test_two_processes_train_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # forks, which have imported everything: importing took most of the time that fresh processes took
    mp.start_processes(_work, (port, str(tmp_path)), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first["weights"], second["weights"])
    alone = tiny_model()
    result = run(alone)
    # Sums over rows in another order: float32 rounding of the loss (eps = 1.2e-7, values of order 3), grown over twelve steps
    # of Adam, whose normalisation makes a gradient's relative error a relative error of the step.
    torch.testing.assert_close(first["loss"], torch.tensor(result.metrics["loss"]), rtol=1e-4, atol=0)
    torch.testing.assert_close(first["weights"], weights(alone), rtol=0, atol=1e-3)
    assert (first["weights"] - weights(alone)).abs().median() < 1e-6
    assert (tmp_path / "run" / "checkpoint.safetensors").is_file()


def test_rows_are_shared_out():
    batch = tiny_batch()
    parts = [Workers(rank, 2).rows(batch) for rank in (0, 1)]
    assert torch.equal(torch.stack([part.inputs for part in parts], dim=1).flatten(0, 1), batch.inputs)
    with pytest.raises(KVLensError, match="multiple of the number of processes"):
        Workers(0, 4).check_batch(6)


def tiny_batch():
    from tiny_runs import tiny_task

    return tiny_task().sample(6, torch.Generator().manual_seed(0))
