"""The random states of a process, kept aside and put back."""

import random

import keras
import numpy as np
from keras import ops

# Keras has no public names for the seed that unseeded random operations share.
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from kmp._backend import backend

# The key of that seed has a name since Keras 3.13.
_SEED = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")


class RandomStates:
    """The random states of Python, NumPy, Keras and the backend as they are now."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._backend = backend.random_state()
        self._seed: keras.random.SeedGenerator | None = global_state.get_global_attribute(_SEED)
        self._value = None if self._seed is None else ops.copy(self._seed.state.value)

    def restore(self) -> None:
        """Put them back; those of layers are the layers' own variables."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._backend()
        if self._seed is not None:
            self._seed.state.assign(self._value)
        global_state.set_global_attribute(_SEED, self._seed)
