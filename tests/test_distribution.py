"""The wheel and the source distribution, built and tried in an environment that has only their dependencies."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import stairwise as sw

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
SHARED = True


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module", params=[".whl", ".gz"])
def python(request, built, tmp_path_factory):
    """An environment with the distribution; dependencies come from this one, stairwise does not."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    # plain paths: the .pth file of the editable install in there is not read
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    own = folder / "bin" / "python"
    assert run(str(own), "-c", "import stairwise", cwd=folder).returncode != 0
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    done = run(str(own), "-m", "pip", "install", *options, str(built[request.param]), cwd=folder)
    assert done.returncode == 0, done.stderr
    return own


def test_it_works_far_from_the_repository(python, tmp_path):
    done = run(str(python.parent / "stairwise"), "--version", cwd=tmp_path)
    assert done.stdout == f"stairwise {sw.__version__}\n", done.stderr
    code = (
        "import stairwise as sw; from stairwise.training.recipe import recipe_names;"
        "print(len([getattr(sw, name) for name in sw.__all__]), 'cifar10-bt' in recipe_names())"
    )
    assert run(str(python), "-c", code, cwd=tmp_path).stdout == f"{len(sw.__all__)} True\n"
    done = run(str(python), "-m", "stairwise", "predict", "photos", "-d", "3", "--json", cwd=tmp_path)
    assert len(json.loads(done.stdout)["gamma"]) == 3, done.stderr
    # stored results come with it
    done = run(str(python), "-m", "stairwise", "reproduce", "fig6", "--from-stored", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert (tmp_path / result["folder"] / "figure.png").is_file()


def test_what_the_source_distribution_holds(built):
    import tarfile

    with tarfile.open(built[".gz"]) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml", "stairwise/__init__.pyi", "tests/conftest.py"}
    assert wanted <= names
    assert not [name for name in names if name.startswith((".venv", "local", "site", "runs"))]
