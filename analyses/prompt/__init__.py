"""What a prompt changes in the predictions on a text, and how exactly its conversion replaces it."""
