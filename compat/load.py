"""The new process: load a program's file, predict, train on, and compare with what was.

python compat/load.py gpt2 model.keras
"""

import sys

import catalogue
import keras
import numpy as np
from runs import QUICK, fitted, kmp_scaled, norms, outputs, reseed

import kmp  # noqa: F401  (registers what a file of kmp needs)


def main(name: str, path: str) -> None:
    """Print how the loaded model agrees; raise if it does not."""
    program = catalogue.program(name)  # imports the classes that the file names
    expected = np.load(path.replace(".keras", ".npz"))
    model = keras.saving.load_model(path)
    model.run_eagerly = bool(QUICK)
    found = outputs(model, program)
    for i, output in enumerate(found):
        np.testing.assert_allclose(output, expected[f"arr_{i}"], rtol=1e-3, atol=1e-4)
    kept = norms(program.optimizer(model)) == list(expected["sizes"])
    if not kept and type(model).compile is not keras.Model.compile:
        program.compiled(model, kmp_scaled, **QUICK)
        assert np.isfinite(fitted(model, program, 1)).all()
        print("same outputs; Keras drops the optimizer of a class with its own `compile`")
        return
    reseed(model)
    losses = fitted(model, program, 2)
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-3)
    assert kept, "the optimizer has not its state"
    print("same outputs, goes on the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
