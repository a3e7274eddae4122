"""Convert, train, save, load and predict one of keras.applications, under both policies.

Training, of which compiling takes the time, is in float16 alone.
"""

import pathlib
import sys

import keras
import numpy as np

import kmp
from kmp._keras import is_graph, layers_of

NORMALIZES = ("EfficientNetB0", "ConvNeXtTiny")  # takes pixels from 0 to 255
LABELS = np.arange(4)


def main(name, directory):
    keras.utils.set_random_seed(0)
    images = np.random.default_rng(0).uniform(0, 1, (4, 32, 32, 3)).astype("float32")
    images *= 255 if name in NORMALIZES else 1
    build = getattr(keras.applications, name)
    model = build(weights=None, input_shape=(32, 32, 3), classes=8)
    # On TensorFlow tracing such a graph takes longer than running it four times.
    eager = keras.backend.backend() == "tensorflow"
    for policy in ("mixed_float16", "mixed_bfloat16"):
        model.compile(keras.optimizers.SGD(1e-4), "sparse_categorical_crossentropy")
        model.run_eagerly = eager
        weights = [w.numpy() for w in model.weights]
        report = kmp.to_mixed_precision(model, policy)
        for before, after in zip(weights, model.weights, strict=True):
            assert np.array_equal(before, after.numpy())
        half = kmp.Policy(policy).compute_dtype
        convolutions = [x for x in layers_of(model) if isinstance(x, keras.layers.Conv2D)]
        assert convolutions and {x.compute_dtype for x in convolutions} == {half}
        assert "output layer" in report.kept.values()

        scaled = isinstance(model.optimizer, kmp.LossScaleOptimizer)
        assert scaled == (policy == "mixed_float16")
        if scaled:
            model.optimizer.build(model.trainable_variables)
            model.optimizer.dynamic_scale.assign(1.0)  # both steps are to count
            loss = model.fit(images, LABELS, batch_size=4, epochs=2, verbose=0).history["loss"]
            assert np.isfinite(loss[-1]) and int(model.optimizer.iterations) == 2
        expected = model.predict(images, verbose=0)
        assert expected.dtype == "float32" and np.isfinite(expected).all()

        file = pathlib.Path(directory) / f"{name}_{policy}.keras"
        model.save(file)
        loaded = keras.models.load_model(file)
        loaded.run_eagerly = eager
        for mine, theirs in zip(layers_of(model), layers_of(loaded), strict=True):
            assert mine.compute_dtype == theirs.compute_dtype or is_graph(mine)
        assert np.array_equal(expected, loaded.predict(images, verbose=0))
        print(name, policy, "kept", report.kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
