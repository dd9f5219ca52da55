"""Command lines, most of them hostile. Each is a list of arguments."""

from hypothesis import strategies as st

NUMBERS = [
    "1",
    "2",
    "0",
    "-1",
    "0.5",
    "1e-300",
    "1e308",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "",
    "x",
    "1" + "0" * 400,
    "٣",
    "1e-4",
]
WHOLE = ["1", "2", "3", "0", "-1", "2.5", "nan", "", "x", "1" + "0" * 400]
TEXTS = [
    "",
    " ",
    ":",
    "::",
    "/",
    ".",
    "..",
    "\n",
    "[/red]",
    "é" * 300,
    "a=b",
    "--",
    "-",
    "\x07",
    "{}",
    "None",
    "%s",
    "~",
]
ARRAYS = [
    "x_a.npy", "x_b.npy", "hole.npy", "endless.npy", "zero.npy", "large.npy", "small.npy", "whole.npy", "complex.npy",
    "half.npy", "flat.npy", "cube.npy", "empty.npy", "one.npy", "text.npy", "wide.npy", "objects.npy", "cut.npy",
    "missing.npy", "file", "run", "array:images.npy", "array:x_a.npy", "array:", "images:", "digits", "nowhere",
]  # fmt: skip
RUNS = [
    "run",
    "null",
    "list",
    "cutjson",
    "bytes",
    "nolog",
    "numbers",
    "cutlog",
    "badpoint",
    "file",
    "nowhere",
    ".",
    "",
    "weights",
]
PLACES = [
    "out/p.png",
    "out/p.html",
    "out",
    "file/x.png",
    "file",
    "p.txt",
    ".",
    "",
    "é.png",
    "a" * 300 + ".png",
    "run/p.png",
]
SETTINGS = {
    "d": WHOLE, "lr": NUMBERS, "batch": ["8", "64", "0", "-1", "x", "1000000"], "steps": ["1", "2", "0", "-1", "x",
    "nan"],
    "loss": ["simclr", "vicreg", "byol", "frossl", "sharpened", "", "x"], "alpha": ["auto", "1", "0", "nan", "1e-200",
    "1e200"],
    "encoder": ["mlp", "fuzznet:good", "fuzznet:raises", "fuzznet:nothing", "fuzznet:number", ":", "os:getcwd", "x:",
    ":x"],
    "loss_options.temperature": NUMBERS, "loss_options.lambda_": NUMBERS, "momentum": NUMBERS, "weight_decay": NUMBERS,
    "optimizer": ["muon", "adam", "sgd", "lars", ""], "schedule": ["cosine", "constant", "x"], "precision": ["bf16",
    "float32", "x"],
    "encoder_options.widths": ["[]", "[0]", "[8, 8]", "8", "[-1]", "['a']"],
    "records": WHOLE, "window": WHOLE, "data": ARRAYS,
    "views": ["none", "simclr", "simclr-small", "x"], "probes": ["['knn']", "['x']", "3"], "nothing": ["1"],
    "": ["1"], "hidden": ["[8]", "[0]", "x"],
    "seed": ["0", "-1", "x", "1" + "0" * 30],
    "final_lr": NUMBERS, "warmup_epochs": NUMBERS, "clip": NUMBERS, "size": ["0", "4", "-1", "x"],
}  # fmt: skip
OPTIONS = {
    "predict": {
        "--dimension": WHOLE, "--alpha": NUMBERS, "--lr": NUMBERS, "--optimizer": ["sgd", "muon", "x"], "--n": ["20",
        *WHOLE],
        "--crop": WHOLE, "--pixels": ["center", "unit", "x"], "--draws": ["3", "0", "-1", "x"],
        "--seed": WHOLE, "--out": PLACES,
    },
    "embed": {
        "--dimension": WHOLE, "--kernel": ["linear", "rbf", "polynomial", "laplace", "ntk", "nngp", "rbf,linear", ",",
        "x"],
        "--alpha": NUMBERS, "--n": ["20", *WHOLE], "--crop": WHOLE, "--seed": WHOLE, "--out": ["out", *PLACES],
    },
    "train": {"--out": ["new", *RUNS], "--checkpoint-minutes": NUMBERS, "--patience": NUMBERS, "--device": ["cpu",
    "cuda", "cuda:x", "x"]},
    "report": {"--out": PLACES, "--spectrum": ["eigenvalues", "covariance", "x"]},
    "spectrum": {
        "--options": ["width=8", "width=9", "width=x", "height=1", "=", "width"], "--z": ["1", "x"], "--h": ["0", "x"],
        "--views": ["none", "simclr", "x"], "--n": ["8", *WHOLE], "--lr": NUMBERS, "--out": ["out", *PLACES],
        "--size": ["4", "0", "x"],
    },
    "ntk": {"--n": ["8", *WHOLE], "--seed": WHOLE, "--precision": ["float64", "float16", "x"], "--device": ["cpu",
    "x"]},
    "repair": {},
    "reproduce": {"--data": ARRAYS, "--set": ["seed=1", "seed=x", "q=1", "n", "=", "seed="], "--out": ["out",
    *PLACES], "--stored": ["out", "file"]},
}  # fmt: skip
FLAGS = {
    "train": ["--restart", "--list", "--json"], "reproduce": ["--from-stored", "--force", "--list", "--json"],
    "ntk": ["--no-initial", "--over-time", "--keep-kernel", "--json"], "repair": ["--yes", "--json"],
}  # fmt: skip
FIXED = [  # commands that would work for long, with arguments that must stop them at once
    ["demo", "--data", "nowhere"], ["demo", "--out", "file"], ["data", "list"], ["data", "check", "--json"], ["data",
    "get", ""],
    ["data", "get", "x", "--from", "npm"], ["watch", ""], ["watch", "nowhere"], ["watch", "file"], ["watch", "run",
    "--port", "-1"],
    ["watch", "run", "--port", "99999999"], ["watch", "run", "--spectrum", "x"], ["watch"], ["--version"], ["x"],
    [""], ["--x"],
]  # fmt: skip


def _mostly(good: list[str], others: list[str]) -> st.SearchStrategy[str]:
    return st.sampled_from([*good * max(1, 2 * len(others) // len(good)), *others])


@st.composite
def _line(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(list(OPTIONS)))
    line = [command, *draw(_arguments(command))]
    possible = list(OPTIONS[command])
    for option in draw(st.lists(st.sampled_from(possible), max_size=3, unique=True)) if possible else ():
        line += [option, draw(st.one_of(st.sampled_from(OPTIONS[command][option]), st.sampled_from(TEXTS)))]
    return line + draw(st.lists(st.sampled_from(FLAGS.get(command, ["--json"])), max_size=1))


def _arguments(command: str) -> st.SearchStrategy[list[str]]:
    if command in ("predict", "embed"):
        return st.tuples(_mostly(["x_a.npy"], ARRAYS + TEXTS), _mostly(["x_b.npy"], ARRAYS)).map(list)
    if command == "train":
        setting = st.sampled_from(list(SETTINGS)).flatmap(
            lambda k: st.sampled_from(SETTINGS[k]).map(lambda v: ["--set", f"{k}={v}"])
        )
        settings = st.lists(setting, max_size=2).map(lambda pairs: [word for pair in pairs for word in pair])
        recipes = _mostly(
            ["good.toml"], ["latin.toml", "broken.toml", "types.toml", "file", "x.toml", "run", *TEXTS[1:]]
        )
        return st.builds(lambda recipe, words: [recipe, *words, "--device", "cpu"], recipes, settings)
    if command == "spectrum":
        models = _mostly(
            ["fuzznet:good"], ["fuzznet:raises", "fuzznet:nothing", "fuzznet:number", "fuzznet:x", "x:y", *TEXTS]
        )
        files, data = (
            _mostly(["weights/step*.pt"], ["weights/*", "nowhere/*", "x_a.npy", *TEXTS]),
            _mostly(["array:images.npy"], ARRAYS),
        )
        return st.builds(
            lambda m, f, d: ["--model", m, "--checkpoints", f, "--data", d, "--device", "cpu"], models, files, data
        )
    if command == "reproduce":
        return st.sampled_from(["fig8", "fig8", "fig77", *TEXTS]).map(lambda name: [name])
    runs = st.lists(_mostly(["run"], RUNS + TEXTS), min_size=1, max_size=2)
    return runs.map(lambda names: [*names, "--n", "40"]) if command == "ntk" else runs  # work that takes little time


LINES = st.one_of(*[_line()] * 9, st.sampled_from(FIXED))
