"""What the states of recurrent layers remember of a prompt."""
