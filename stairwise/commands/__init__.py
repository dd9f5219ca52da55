"""One file per command: its options, its call and its output."""
