"""A training step of one model in one precision: milliseconds, and bytes, of each optimizer.

    python benchmarks/gpu_step.py --model large_transformer --policy mixed_bfloat16
    python benchmarks/gpu_step.py --model resnet50 --policy bfloat16 --only "kmp, health"
    python benchmarks/gpu_step.py --policy bfloat16 --half-memory    the modes of half memory

On JAX. All optimizers train in one process, in turn, some steps at a time; a ratio is that of the
medians, over plain Adam, with the quartiles of the ratios of neighbouring turns. The bytes of a
step are what XLA plans for arguments, results and working memory. With `--only` the device's own
peak is printed too, which a process that runs several cannot tell apart.
"""

import argparse
import statistics

import against_peers  # first: it sets the environment
import device_turns
import jax
import keras
import models

OPTIMIZERS = {
    "Adam": "keras unscaled",
    "Keras's LossScaleOptimizer": "Keras",
    "kmp, not measuring": "kmp, not measuring",
    "kmp, health": "kmp",
    "kmp, watched": "kmp, watched",
    "kmp, spikes": "kmp, spikes",
}
HALF_MEMORY = {
    "Adam": "keras unscaled",
    "kmp, health": "kmp",
    **{name: name for name in against_peers.SETTINGS if "slots" in name or "masters" in name},
}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models.MODELS, default="large_transformer")
    parser.add_argument("--policy", default="mixed_bfloat16")
    known = {**OPTIMIZERS, **HALF_MEMORY}
    parser.add_argument("--only", choices=known, help="measure this alone")
    parser.add_argument("--half-memory", action="store_true", help="compare its modes instead")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps of one turn")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    variants = HALF_MEMORY if arguments.half_memory else OPTIMIZERS
    if arguments.only:
        variants = {arguments.only: known[arguments.only]}
    names = list(variants)
    build = models.MODELS[arguments.model]
    with device_turns.compiling():
        lowered = {name: against_peers.keras_step(build, variants[name]) for name in names}
        runs = against_peers.compiled(lowered)
    title = f"{arguments.model}, {arguments.policy}"
    with device_turns.timing():
        times = against_peers.take_turns(runs, arguments.rounds, arguments.steps, title)
    millions = runs[names[0]].parameters / 1e6
    print(f"{title}, {millions:.1f} million parameters, {jax.devices()[0].device_kind}")
    base = next(iter(times.values()))
    for name, each in times.items():
        ms, ratios = statistics.median(each), [a / b for a, b in zip(each, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = f"{ms / statistics.median(base):.4f} [{low:.4f}, {high:.4f}]"
        print(f"{name:32} {ms:9.2f} ms  {ratio}  {runs[name].bytes / 1e9:7.3f} GB by XLA")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if arguments.only and peak:
        print(f"{'peak of the device':32} {peak / 1e9:7.3f} GB")


if __name__ == "__main__":
    main()
