"""One file per command: its options, its call, what it prints."""
