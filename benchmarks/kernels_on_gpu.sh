#!/bin/sh
# All measurements of kernels at scale on one GPU, the most important first, in about five minutes.
#
#     sh benchmarks/kernels_on_gpu.sh OUT [IMAGES.npz]
#
# A part that fails or takes too long does not stop the others. Results are JSON in OUT, beside a log.
# IMAGES.npz: images with labels and a test set, as benchmarks/race reads them; without it the probes are left out.
# PYTHON: the interpreter. SCALE, CONV, PROBES: options instead of those below, for a try on a CPU.
set -u
out=$1
images=${2-}
python=${PYTHON-python3}
scale=${SCALE---device cuda}
conv=${CONV---device cuda --images 48}
probes=${PROBES---device cuda --few 4096 --steps 1500 --seconds 25}
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}." PYTHONUNBUFFERED=1
mkdir -p "$out"

part() {  # name, seconds, command
    name=$1; limit=$2; shift 2
    begun=$(date +%s)
    echo "== $name" >>"$out/log.txt"
    timeout "$limit" "$@" >>"$out/log.txt" 2>&1
    code=$?
    tail -n 12 "$out/log.txt"
    echo "$name: exit $code after $(($(date +%s) - begun)) s" | tee -a "$out/times.txt"
}

# shellcheck disable=SC2086  # options are words
{
    part exact 100 $python -m benchmarks.bench_scale $scale --parts exact --out "$out/scale.jsonl"
    part nystroem 90 $python -m benchmarks.bench_scale $scale --parts nystroem --out "$out/scale.jsonl"
    part conv 120 $python -m benchmarks.bench_conv_kernel $conv --out "$out/conv.json"
    part fit 60 $python -m benchmarks.bench_scale $scale --parts fit --out "$out/scale.jsonl"
    part peers 90 $python -m benchmarks.bench_scale $scale --parts peers --out "$out/scale.jsonl"
    if [ -n "$images" ]; then
        part probes 170 $python -m benchmarks.bench_kernel_probes $probes --data-file "$images" --out "$out/probes.json"
    fi
}
