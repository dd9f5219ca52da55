"""`python -m tests.monitor.libraries --write` writes the table of libraries in docs/staircase.md."""

import logging
import sys
import warnings

import torch

from tests.monitor.libraries.torchvision_on_cpu import import_torchvision

import_torchvision()

from tests.monitor.libraries import table  # noqa: E402

if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table.write()
