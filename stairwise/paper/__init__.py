"""One file per figure or table; its docstring is its label: command, time and expected outcome.

Each has `Config`, the settings; `compute(config, progress)`, the arrays; `check(arrays)`, the claims; `draw(arrays)`,
the figure, described by `ALT`; and `page(arrays)`, interactive charts and tables. `harness.run` calls them.
"""
