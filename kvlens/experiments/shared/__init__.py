"""What the experiments of all papers need: learning curves, differences over seeds, and what a run leaves behind."""
