"""What can be read off a run while it learns; usable in anybody's training loop."""
