"""What the experiments of all papers share: declaring and writing them, training, significance, and the look of figures."""
