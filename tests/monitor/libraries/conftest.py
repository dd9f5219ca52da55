"""Only where the libraries are installed (`make libraries`)."""

from importlib.util import find_spec

INSTALLED = all(find_spec(name) for name in ("lightly", "timm", "torchvision", "transformers", "accelerate"))
collect_ignore_glob = [] if INSTALLED else ["*.py"]
