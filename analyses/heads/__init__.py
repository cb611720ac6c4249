"""What single heads do: where they attend, what they copy, which heads they read."""
