"""What can be said before training."""
