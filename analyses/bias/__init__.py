"""What a converted prompt's bias consists of, what reads it, and what is lost without it."""
