"""Only where the libraries are installed (`make libraries`)."""

from importlib.util import find_spec

from tests.monitor.libraries.torchvision_on_cpu import import_torchvision

collect_ignore_glob: list[str] = []
if all(find_spec(name) for name in ("lightly", "timm", "torchvision", "transformers", "accelerate")):
    import_torchvision()
else:
    collect_ignore_glob.append("*.py")
