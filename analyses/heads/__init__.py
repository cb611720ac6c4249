"""What single heads do: where they look, what they copy, whom they read."""
