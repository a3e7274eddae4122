"""Send kmp's measurements to a tracker or, as here, a file of your own: `on_report=`.

    python examples/other_trackers.py

At each look `GradientHealth` calls a function of yours with a flat dict of plain numbers: the loss
scale, the skipped steps, the verdict, the norm of each variable's gradient. This script appends it
to a file of JSON lines, which needs neither a server nor an account, and reads it back.
docs/trackers.md has the lines for Weights & Biases, MLflow, Aim and CSV.
"""

import argparse
import json
import os
import pathlib
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow looks for a GPU, and says so

import keras
from sklearn.datasets import load_digits

import kmp


class JsonLines:
    """Appends each report to a file, as one line of JSON."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def __call__(self, report: dict[str, Any]) -> None:
        """Write one report."""
        with self.path.open("a") as file:
            file.write(json.dumps(report | {"verdict": str(report["verdict"])}) + "\n")


def main() -> None:
    """Train, write a report at every tenth step, and read them back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=pathlib.Path, default="logs/other_trackers/reports.jsonl")
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that it runs")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    digits = load_digits()
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            kmp.layers.Float32OutputDense(10, name="head"),
        ]
    )
    model.compile(
        kmp.scaled("adam", learning_rate=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    health = kmp.callbacks.GradientHealth(update_freq=10, on_report=JsonLines(arguments.path))
    x, y = (digits.data / 16.0).astype("float32"), digits.target
    epochs = 1 if arguments.smoke else 5
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=2, callbacks=[health])

    reports = [json.loads(line) for line in arguments.path.read_text().splitlines()]
    print("\n step  loss scale  skipped  gradient norm  of the first kernel  verdict")
    first = next(name for name in reports[0] if name.startswith("variable_grad_norm/"))
    for report in reports:
        print(
            f"{report['step']:5d}  {report['loss_scale']:10g}  {report['skipped_steps']:7d}  "
            f"{report['grad_norm']:13.3f}  {report[first]:19.3f}  {report['verdict']}"
        )
    print(f"\n{len(reports)} reports of {len(reports[0])} numbers: {arguments.path}")


if __name__ == "__main__":
    main()
