"""Write the files of this folder: models as a release of kmp saves them.

    KERAS_BACKEND=tensorflow python tests/saved_files/write.py FOLDER

Beside each file goes an .npz with the predictions and the state that the model had.

The files that are here now were written by kmp 0.1.0, and later versions have to load them. So do
not write them again: what a new version saves differently gets a new name beside them.
"""

import pathlib
import sys

import models
import numpy as np

import kmp


def save(model, folder, stem, inputs):
    predictions = model.predict(inputs, verbose=0)
    state = {f"state {name}": x for name, x in models.state(model).items()}
    model.save(folder / f"{stem}.keras")
    if stem in models.WEIGHTS_ALONE:
        model.save_weights(folder / f"{stem}.weights.h5")
    np.savez_compressed(
        folder / f"{stem}.npz", predictions=predictions, policies=models.policies(model), **state
    )


def write(folder):
    for name in models.MODELS:
        model = models.trained(name)
        for stem in models.stems(name):
            if stem.endswith("int8"):
                kmp.to_int8(model)
            save(model, folder, stem, models.inputs_of(name))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
