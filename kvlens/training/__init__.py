"""Training small models: settings, the loop with exact resume, recipes of the shipped models, and what is measured on them.

task = make_task("induction", vocab_size=64, length=48)
model = build_model(task, {"n_layers": 1, "d_model": 64, "kv_shift": True})
result = train(model, task, steps=500, learning_rate=2e-3, folder="run")
result.heldout  # loss and accuracy against step
"""

from kvlens.training.context import ContextEffect, context_effect
from kvlens.training.distributed import Workers, process_group
from kvlens.training.objective import Objective, check_fit
from kvlens.training.recipes import RECIPES, Recipe, build_model, build_task, find_recipe
from kvlens.training.run import NotFiniteError, decayed_parameters
from kvlens.training.schedule import Schedule
from kvlens.training.settings import TrainSettings
from kvlens.training.ship import train_recipe
from kvlens.training.trainer import TrainResult, score_heldout, train

__all__ = [
    "RECIPES",
    "ContextEffect",
    "NotFiniteError",
    "Objective",
    "Recipe",
    "Schedule",
    "TrainResult",
    "TrainSettings",
    "Workers",
    "build_model",
    "build_task",
    "check_fit",
    "context_effect",
    "decayed_parameters",
    "find_recipe",
    "process_group",
    "score_heldout",
    "train",
    "train_recipe",
]
