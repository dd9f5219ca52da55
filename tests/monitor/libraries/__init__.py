"""The monitor in libraries of others: the real ones where they are installed, else modules of their shape."""
