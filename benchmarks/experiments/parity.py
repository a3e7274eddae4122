"""Train every built-in task in float32 and in half precision, and write docs/parity.md.

    KERAS_BACKEND=jax python benchmarks/experiments/parity.py

The same as `python -m kmp certify --all`, with two things set: XLA rounds wherever the program says
so, rather than keep what it fuses in float32, and JAX compiles each step once for all seeds.
"""

import argparse
import os
import pathlib
import shutil
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{tempfile.gettempdir()}/kmp-parity-{os.getpid()}"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

from kmp.cli.certify import Certificate, certify
from kmp.cli.doctor import environment
from kmp.cli.ledger import Ledger
from kmp.cli.printing import Progress
from kmp.cli.tasks import TASKS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "parity.md"

INTRODUCTION = """# Parity with float32

Does half precision train as well as float32? Micikevicius et al. (2018) report that it does on
every task that they tried. This page asks the same of kmp, on tasks that any machine can repeat:

```bash
pip install '/path/to/this/clone[jax,examples]'
KERAS_BACKEND=jax python benchmarks/experiments/parity.py   # writes this page
python -m kmp certify --task digits             # one task; or module:function for one of yours
```

For each seed every policy begins with the same weights and sees the same batches in the same order.
The differences of the test metric, seed by seed, then go into two one-sided t tests: half precision
counts as *equivalent* only if the 90% interval of the mean difference lies within the margin
(p < 0.05 for both tests). Too few or too noisy runs end in "no", not in "yes".

Margins and numbers of seeds were chosen before any half precision was tried: one point of accuracy,
2% of a loss or an error. (The text task was made smaller twice, because it took too long; before
the second time two of its seeds had been seen.) Each task
holds half of its data (text: a quarter) back for the test, split again by each seed, and Adam's
learning rate decays to nothing over the run. XLA is told to round wherever the program says so.

| task | model | data |
|---|---|---|
| digits | CNN with BatchNormalization | 1,797 images of 8 x 8 pixels, scikit-learn |
| breast_cancer | MLP | 569 samples of 30 features, scikit-learn |
| diabetes | MLP, regression | 442 samples of 10 features, scikit-learn |
| text | causal transformer, 2 blocks | characters of the docstrings of Python's standard library |
| denoising | autoencoder, 64-128-32-128-64 | the digits with noise of 0.3 added, scikit-learn |

All but the last are converted with `kmp.to_mixed_precision`; `mixed_float16` has the default loss
scale. `bfloat16` keeps weights and slots of Adam in bfloat16, each rounded at random once a step;
`bfloat16,slot_dtype=float32` keeps the slots in float32. Normalization layers and the output layer
stay in float32 in both, as the conversion leaves them. `float16` keeps its parameters in float16
too and scales nothing, as `keras.config.set_dtype_policy("float16")` would: the counter-example,
for which kmp does not vouch.
"""

REMARK = """
Speed is float32's step over this policy's, seed by seed, and memory is what a training step holds
at most. Both are those of a CPU that computes float16 by way of float32, on models far too small to
gain anything: they are printed because a claim without its cost is none. Measure yours on your
device with `python -m kmp bench`.
"""


def markdown(certificates: list[Certificate], minutes: float, cpu_minutes: float) -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Result\n"]
    for policy in (run.policy for run in certificates[0].runs[1:]):
        runs = [run for c in certificates for run in c.runs if run.policy == policy]
        passed = sum(run.result.equivalent for run in runs)
        note = "" if runs[0].counts else " (the counter-example)"
        parts.append(f"- `{policy}`{note}: equivalent on {passed} of {len(runs)} tasks.")
    parts.append(REMARK)
    for each in certificates:
        header, *rows = each.cells
        parts.append(f"### {each.title}\n")
        parts += [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
        parts.append("")
    facts = ", ".join(f"{name} {value}" for name, value in environment().items())
    parts.append(f"Memory: {certificates[0].runs[0].memory.source}. Made in {minutes:.0f} minutes")
    parts.append(f"({cpu_minutes:.0f} minutes of CPU time): {facts}.\n")
    return "\n".join(parts)


def main() -> None:
    """Train, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=PAGE)
    parser.add_argument("--resume", help="keep finished trainings in this file, and go on from it")
    arguments = parser.parse_args()
    start = time.time()
    ledger = Ledger(arguments.resume, environment())
    certificates = []
    for task in TASKS.values():
        with Progress(f"certify {task.name}") as progress:
            certificates.append(certify(task, progress=progress, ledger=ledger))
        print(f"{certificates[-1]}\n", flush=True)
    page = markdown(certificates, (time.time() - start) / 60, time.process_time() / 60)
    arguments.output.write_text(page, encoding="utf-8")
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


if __name__ == "__main__":
    main()
