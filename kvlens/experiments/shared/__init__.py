"""Shared by all experiments: learning curves, sweeps, differences over seeds, the significance test, and results on disk."""
