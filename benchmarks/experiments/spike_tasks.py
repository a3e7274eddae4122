"""The tasks and optimizers of spikes.py, none of which was used to choose the rule's settings."""

import pathlib
import sysconfig

import keras
import numpy as np
from keras import layers

OPTIMIZERS = {
    "SGD, momentum": lambda rate: keras.optimizers.SGD(10 * rate, momentum=0.9),
    "Adam": keras.optimizers.Adam,
    "AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01),
    "Lion": lambda rate: keras.optimizers.Lion(rate / 5),
    "Muon": lambda rate: keras.optimizers.Muon(rate),
}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Of a bad batch: inputs in another unit with wrong labels, and targets in another unit.
FAULTS = (1e2, 1e4, 1e8)
HARMED = 1.25  # times the loss of the run that never saw the batch


def teacher(random, rows):
    """Classes of a random network, with a tenth of the labels wrong."""
    x = random.normal(size=(rows, 20)).astype("float32")
    hidden = np.tanh(x @ np.random.default_rng(1).normal(size=(20, 30)))
    y = (hidden @ np.random.default_rng(2).normal(size=(30, 5))).argmax(axis=1)
    wrong = random.random(rows) < 0.1
    return x, np.where(wrong, random.integers(0, 5, rows), y)


def bars(random, rows):
    """Pictures of horizontal and vertical bars in noise."""
    x = random.normal(size=(rows, 12, 12, 1)).astype("float32")
    y = random.integers(0, 4, rows)
    for i, label in enumerate(y):
        place = random.integers(0, 12)
        where = (place, slice(None)) if label % 2 else (slice(None), place)
        x[i][where] += 3.0 if label < 2 else -3.0
    return x, y


def text(random, rows):
    """Letters of modules of Python's own library, to predict the next one."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = "".join((folder / f"{name}.py").read_text() for name in ("argparse", "typing", "ast"))
    letters = np.frombuffer(code.encode("ascii", "replace"), "uint8") % 128
    starts = random.integers(0, len(letters) - 33, rows)
    windows = letters[starts[:, None] + np.arange(33)]
    return windows[:, :32].astype("int32"), windows[:, 1:].astype("int32")


def rare_words(random, rows):
    """Ids after Zipf's law: most rows of an embedding are met a few times only."""
    ids = np.minimum(random.zipf(1.2, size=(rows, 6)), 2_000) - 1
    return ids.astype("int32"), ((ids % 7).sum(axis=1) // 6).clip(0, 2)


def heavy_tails(random, rows):
    """Targets with noise of Student's t with 3 degrees of freedom."""
    x = random.normal(size=(rows, 10)).astype("float32")
    return x, (np.sin(x[:, :1]) + x[:, 1:2] + random.standard_t(3, size=(rows, 1))).astype(
        "float32"
    )


def rare_labels(random, rows):
    """One row in 800 is positive."""
    y = (random.random(rows) < 1 / 800).astype("int32")
    x = random.normal(size=(rows, 10)).astype("float32")
    x[:, :3] += 1.5 * y[:, None]
    return x, y


def walks(random, rows):
    """Random walks whose steps grow in bursts, to predict the next step."""
    scale = np.exp(np.cumsum(random.normal(0, 0.3, size=(rows, 17)), axis=1))
    steps = (scale * random.normal(size=(rows, 17))).astype("float32")
    return np.cumsum(steps[:, :16], axis=1)[..., None] / 10, steps[:, 16:] / 10


def constant_rows(random, rows):
    """To reconstruct sparse rows, one in five of which is empty."""
    x = random.normal(size=(rows, 30)) * (random.random((rows, 30)) < 0.1)
    x[random.random(rows) < 0.2] = 0
    return x.astype("float32"), x.astype("float32")


def dense(units, outputs):
    """Two hidden layers and an output."""
    return [layers.Dense(units, "relu"), layers.Dense(units, "relu"), layers.Dense(outputs)]


# Data, layers, loss, learning rate of Adam, batch.
TASKS = {
    "teacher and student": (teacher, lambda: dense(64, 5), CROSS_ENTROPY, 1e-3, 32),
    "pictures, BatchNormalization": (
        bars,
        lambda: [
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4),
        ],
        CROSS_ENTROPY,
        1e-3,
        32,
    ),
    "text, GRU": (
        text,
        lambda: [
            layers.Embedding(128, 32),
            layers.GRU(48, return_sequences=True),
            layers.Dense(128),
        ],
        CROSS_ENTROPY,
        2e-3,
        16,
    ),
    "rare words": (
        rare_words,
        lambda: [layers.Embedding(2_000, 16), layers.Flatten(), *dense(32, 3)],
        CROSS_ENTROPY,
        2e-3,
        32,
    ),
    "heavy tails": (heavy_tails, lambda: dense(32, 1), keras.losses.MeanSquaredError(), 1e-3, 32),
    "rare labels": (rare_labels, lambda: dense(32, 2), CROSS_ENTROPY, 1e-3, 64),
    "walks, LSTM": (
        walks,
        lambda: [layers.LSTM(24), layers.Dense(1)],
        keras.losses.MeanSquaredError(),
        1e-3,
        32,
    ),
    "sparse rows": (constant_rows, lambda: dense(32, 30), keras.losses.MeanSquaredError(), 1e-3, 8),
}


def spoil(x, y, size):
    """Return a batch as it would be in another unit, `size` times as large."""
    return (x, y * size) if y.dtype.kind == "f" else (x * size, np.roll(y, 1))
