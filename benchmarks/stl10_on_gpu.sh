#!/bin/sh
# The STL-10 runs behind the paper's figures and tables: several at once on one GPU, in parts of half an hour on an H200.
#
#     sh benchmarks/stl10_on_gpu.sh PART OUT
#
#     PART          runs                                                 figures and tables
#     d50           Barlow Twins at batch 256, SimCLR, VICReg, d = 50    Tables 1 and 2, coming
#     vicreg-small  VICReg from small initialization; BYOL               Figs. 2E,F, 5, 7, coming, byol
#     vicreg        VICReg; BYOL from small initialization               Figs. 3, 4, 7, byol
#     simclr        SimCLR; SimCLR with a warm-up on CIFAR-10            Figs. 3, 4, 7, sharpness
#     seed1         SimCLR from small initialization, seed 1             Figs. 2C,D, 5, 7, coming, in OUT/results/seed1
#
# Results are added to those of OUT/results, which begins as a copy of docs/results. The runs are in OUT/runs: the same
# command continues them. A run that fails does not stop the others. OUT/times.txt says what ended, when, and how.
# STAIRWISE: the command, by default `stairwise`; with STAIRWISE="echo stairwise" the script shows what it would do.
set -u
part=$1
out=$(mkdir -p "$2" && cd "$2" && pwd)
stairwise=${STAIRWISE-stairwise}
results=$out/results
begun=$(date +%s)

if [ ! -d "$results" ]; then
    mkdir -p "$results/seed1"
    for file in docs/results/*.json; do
        name=$(basename "$file" .json)
        [ -f "docs/results/$name.npz" ] && cp "$file" "docs/results/$name.npz" "$results"
    done
fi

timed() {  # name, command: its output goes to OUT/NAME.txt
    name=$1; shift
    "$@" >>"$out/$name.txt" 2>&1
    echo "$name: exit $? after $(($(date +%s) - begun)) s" >>"$out/times.txt"
}

# shellcheck disable=SC2086  # options are words
train() {  # run, options
    run=$1; shift
    timed "$run" $stairwise train "${run%-seed*}" --out "$out/runs/$run" --set compile=true "$@"
}

# Measures beside other runs, and stores with the second call, which finds everything measured: one at a time, because
# figures are joined with those that are stored.
# shellcheck disable=SC2086
reproduce() {  # folder of results, figure, options
    place=$1; figure=$2; shift 2
    set -- $stairwise reproduce "$figure" --set runs="$out/runs" --out "$out/work" "$@"
    timed "$figure" "$@"
    (
        flock 9
        timed "$figure-stored" "$@" --store "$place" --join
    ) 9>"$out/lock"
}

small() {  # method: its run from small initialization
    train "stl10-$1-small"
    reproduce "$results" fig2cf --set methods="$1"
    reproduce "$results" fig5 --set methods="$1"
    reproduce "$results" fig7 --set methods="$1" --set only=small
    reproduce "$results" coming --set methods="$1"
}

standard() {  # method: its run from standard initialization
    train "stl10-$1"
    reproduce "$results" fig3 --set methods="$1"
    reproduce "$results" fig4 --set methods="$1"
    reproduce "$results" fig7 --set methods="$1" --set only=standard
}

byol() {  # suffix of the recipe, kind
    train "stl10-byol$1"
    reproduce "$results" byol --set only="$2"
}

d50() {  # method, suffix of its run, option of Table 1
    train "stl10-$1-d50$2"
    method=$1; shift 2
    reproduce "$results" table1 --set methods="$method" --set batches=3 --set lengths=true "$@"
    reproduce "$results" coming --set methods="$method" --set d50=true
}

# several processes use a GPU at the same time only through this service
if command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY="$out/mps" CUDA_MPS_LOG_DIRECTORY="$out/mps"
    mkdir -p "$out/mps"
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    else
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
fi

case $part in
d50)
    d50 bt -large --set large=true &
    d50 simclr "" &
    d50 vicreg "" &
    wait
    reproduce "$results" table2 --set large=true --set batches=3
    ;;
vicreg-small)
    small vicreg &
    byol "" standard &
    wait
    ;;
vicreg)
    standard vicreg &
    byol -small small &
    wait
    ;;
simclr)
    standard simclr &
    for seed in 1 2; do
        options="--set methods=simclr --set control=warm --set seeds=1 --set run_seed=$seed"
        # shellcheck disable=SC2086
        reproduce "$results" sharpness $options
    done &
    wait
    ;;
seed1)
    train stl10-simclr-small-seed1 --set seed=1
    for figure in fig2cf fig5 "fig7 --set only=small" coming; do
        # shellcheck disable=SC2086
        reproduce "$results/seed1" $figure --set methods=simclr --set run_seed=1
    done
    ;;
*)
    echo "PART must be d50, vicreg-small, vicreg, simclr or seed1, not $part" >&2
    exit 2
    ;;
esac
cat "$out/times.txt"
