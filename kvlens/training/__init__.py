"""Training small models: settings, a loop that resumes exactly, recipes of the shipped models, and their measurements.

task = make_task("induction", vocab_size=64, length=48)
model = build_model(task, {"n_layers": 1, "d_model": 64, "kv_shift": True})
result = train(model, task, steps=500, learning_rate=2e-3, folder="run")
result.heldout  # loss and accuracy against step
"""

from kvlens.training.recipes import Recipe, build_model, find_recipe
from kvlens.training.run import Loss, NotFiniteError, Score, TrainSettings
from kvlens.training.ship import train_recipe
from kvlens.training.trainer import TrainResult, score_heldout, train

__all__ = [
    "Loss",
    "NotFiniteError",
    "Recipe",
    "Score",
    "TrainResult",
    "TrainSettings",
    "build_model",
    "find_recipe",
    "score_heldout",
    "train",
    "train_recipe",
]
