"""Arrays in, matplotlib figures out. Nothing is computed here and no other room is known."""
