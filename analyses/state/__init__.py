"""Analyses of what the states of recurrent layers retain of a prompt."""
