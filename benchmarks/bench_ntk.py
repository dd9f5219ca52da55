"""How fast is the empirical tangent kernel? Against vmap(grad) and torch.func's tutorial, in one run.

    python benchmarks/bench_ntk.py [--device cuda] [--n 512] [--large 12000] [--draws 12] [--quick]

CPU and GPU: ResNet-18 of half the width (2.8M parameters), 32 px, N = 512. vmap(grad) keeps all gradients, 6 GB.
GPU only:
- ResNet-50, 96 px, d = 50, N = 2000, as initialized, in every precision, with errors against float64 (64 samples);
- the error that float16 products add, with batch-norm statistics of noise, which make gradients chaotic (float32 itself
  is off by 4 to 7e-3 there);
- errors over several draws of weights and images, with those of vmap(grad) in float32;
- ResNet-18, 32 px, N = `--large`, and the time that 60,000 images would take (it grows with the square).

  ours      `empirical_ntk`: factors of every layer, the cheapest way for each
  vmap      vmap(grad) once, all gradients kept, one product per parameter
  tutorial  jacobians of chunks by vmap(jacrev), contracted chunk by chunk, as in torch.func's tutorial

Times are the better of two rounds, of the tutorial one round. The last line is JSON.
"""

import argparse
import json

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

from benchmarks.clock import timed
from stairwise.kernel.precision import float32_products
from stairwise.nets.encoder import build_encoder
from stairwise.ntk.empirical import empirical_ntk

AIM = 1e-4  # largest |ΔK_ij| / √(K_ii K_jj)


def network(name, d, device, statistics=True, seed=0, **options):
    torch.manual_seed(seed)
    encoder = build_encoder(name, options)
    features = encoder(torch.zeros(2, 3, 32, 32)).shape[1]
    model = nn.Sequential(encoder, nn.Linear(features, d)).to(device)
    with torch.no_grad():
        for _ in range(20 if statistics else 0):
            model.train()(torch.randn(64, 3, 32, 32, device=device))
    return model.eval()


def parts(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def scalar(values, sample):
        out = functional_call(model, values, (sample.unsqueeze(0),))[0]
        return out.sum() / len(out) ** 0.5

    return parameters, scalar


def by_vmap(model, x, chunk):
    """All gradients, then one product per parameter."""
    parameters, scalar = parts(model)
    one = vmap(grad(scalar), in_dims=(None, 0))
    chunks = [one(parameters, some) for some in x.split(chunk)]
    K = x.new_zeros(len(x), len(x))
    for name in parameters:
        G = torch.cat([g[name].flatten(1) for g in chunks])
        K += G @ G.T
    return K


def by_tutorial(model, x, chunk):
    """Blocks of the kernel from the jacobians of two chunks."""
    parameters, scalar = parts(model)
    jacobian = vmap(jacrev(scalar), in_dims=(None, 0))
    K = x.new_zeros(len(x), len(x))
    for i, a in enumerate(x.split(chunk)):
        for j, b in enumerate(x.split(chunk)):
            J_a, J_b = jacobian(parameters, a), jacobian(parameters, b)
            block = sum(J_a[name].flatten(1) @ J_b[name].flatten(1).T for name in parameters)
            K[i * chunk : i * chunk + len(a), j * chunk : j * chunk + len(b)] = block
    return K


def shortest(call, device, rounds=1):
    """Result, and shortest time."""
    runs = [timed(call, device) for _ in range(rounds)]
    return runs[-1][1], min(seconds for seconds, _ in runs)


def errors(model, x, K, samples=64):
    """Largest and median |ΔK_ij| / √(K_ii K_jj) against float64."""
    exact = empirical_ntk(model, x[:samples], precision="float64")
    off = normalized(K[:samples, :samples] - exact, exact)
    return float(off.max()), float(off.median())


def normalized(difference, exact):
    size = exact.diagonal().sqrt()
    return (difference / torch.outer(size, size)).abs()


def over_draws(device, draws, results):
    """Errors of float32 passes, ResNet-50 as initialized, over draws of weights and images: the largest of 16 and of 64
    samples, the median, and ‖ΔK‖/‖K‖."""
    ways = {
        "vmap_float32": lambda model, x: by_vmap(model, x[:64], 16),
        "float32": lambda model, x: empirical_ntk(model, x),
        "float16": lambda model, x: empirical_ntk(model, x, precision="float16"),
    }
    rows = {name: [] for name in ways}
    for seed in range(draws):
        model = network("resnet50", 50, device, statistics=False, seed=seed)
        x = torch.randn(256, 3, 96, 96, device=device)
        exact = empirical_ntk(model, x[:64], precision="float64")
        for name, way in ways.items():
            difference = way(model, x)[:64, :64] - exact
            off = normalized(difference, exact)
            rows[name].append([off[:16, :16].max(), off.max(), off.median(), difference.norm() / exact.norm()])
    for name, row in rows.items():
        few, many, median, whole = torch.tensor(row).T
        print(f"{draws} draws, {name}:", flush=True)
        print(f"  largest of 16 samples {few.min():.1e} … {few.max():.1e}, {int((few <= AIM).sum())} within {AIM:.0e};")
        print(f"  of 64 {many.min():.1e} … {many.max():.1e}, {int((many <= AIM).sum())} within;")
        print(f"  median {median.min():.1e} … {median.max():.1e}; ‖ΔK‖/‖K‖ {whole.min():.1e} … {whole.max():.1e}")
        results[f"{name}_within_aim_of_16"] = float((few <= AIM).sum()) / draws


def against_peers(device, n, quick, results):
    width = 8 if quick else 32
    model = network("resnet18", 10, device, stem="small", width=width)
    x = torch.randn(n, 3, 32, 32, device=device)
    empirical_ntk(model, x[:8])
    K, ours = shortest(lambda: empirical_ntk(model, x), device, 2)
    rows = {"ours": ours}
    for name, call in (("vmap", lambda: by_vmap(model, x, 64)), ("tutorial", lambda: by_tutorial(model, x, 64))):
        other, rows[name] = shortest(call, device, 2 if name == "vmap" else 1)
        off = float(((other - K).abs() / K.diagonal().max()).max())
        print(f"{name:<9} differs by {off:.1e} of the largest entry", flush=True)
        results[f"{name}_over_ours"] = rows[name] / ours
    for name, seconds in rows.items():
        print(f"ResNet-18, width {width}, N = {n:<6} {name:<9} {seconds:8.2f} s", flush=True)


def on_gpu(device, large, draws, quick, results):
    n = 64 if quick else 2000
    model = network("resnet50", 50, device, statistics=False)
    x = torch.randn(n, 3, 96, 96, device=device)
    for precision in ("tf32", "float16", "float32"):
        empirical_ntk(model, x[:64], precision=precision)
        torch.cuda.reset_peak_memory_stats()
        K, seconds = shortest(lambda p=precision: empirical_ntk(model, x, precision=p), device, 3)
        (error, median), peak = errors(model, x, K), torch.cuda.max_memory_allocated() / 2**30
        print(f"ResNet-50, 96 px, N = {n}, {precision:<8} {seconds:7.3f} s, {peak:.0f} GiB", flush=True)
        print(f"  error: largest {error:.1e}, median {median:.1e}", flush=True)
        results |= {f"resnet50_{precision}_s": seconds, f"resnet50_{precision}_error": error}
        results[f"resnet50_{precision}_median_error"] = median
    model = network("resnet50", 50, device)
    exact, half = (empirical_ntk(model, x, precision=p) for p in ("float32", "float16"))
    results["float16_adds"] = float(normalized(half - exact, exact).max())
    print(f"float16 products add {results['float16_adds']:.1e} to the error", flush=True)
    del exact, half
    if draws:
        with float32_products(tf32=False):  # applies to vmap(grad), too
            over_draws(device, 1 if quick else draws, results)
    model = network("resnet18", 10, device, stem="small")
    x = torch.randn(large, 3, 32, 32, device=device)
    for precision in ("tf32", "float16"):
        K, seconds = shortest(lambda p=precision: empirical_ntk(model, x, precision=p), device)
        whole = seconds * (60_000 / large) ** 2
        error, median = errors(model, x, K)
        print(f"ResNet-18, 32 px, N = {large}, {precision:<8} {seconds:7.2f} s", flush=True)
        print(f"  error: largest {error:.1e}, median {median:.1e}", flush=True)
        print(f"  60,000 images at this rate: {whole / 60:.1f} min", flush=True)
        results |= {f"resnet18_{precision}_s": seconds, f"resnet18_{precision}_60000_min": whole / 60}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--large", type=int, default=12_000)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="narrow networks, to try the script")
    options = parser.parse_args()
    device, results = torch.device(options.device), {}
    against_peers(device, options.n, options.quick, results)
    if device.type == "cuda":
        on_gpu(device, options.large, options.draws, options.quick, results)
    print(json.dumps({name: float(f"{value:.4g}") for name, value in results.items()}))


if __name__ == "__main__":
    main()
