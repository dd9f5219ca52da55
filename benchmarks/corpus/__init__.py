"""Short training runs whose truth is known, to measure how often the monitor's words are right."""
