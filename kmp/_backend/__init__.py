"""What differs between backends: the only place that names tf, jax or torch.

`base.Backend` documents each function. `backend` is an instance of its subclass for the backend
that Keras runs on.
"""

import importlib

import keras

from kmp._backend.base import Backend
from kmp._backend.sharding import UNSHARDED as UNSHARDED
from kmp._backend.sharding import Sharding as Sharding

_NAME = keras.backend.backend()
if _NAME not in ("tensorflow", "jax", "torch"):
    raise ImportError(
        "kmp runs on the Keras backends tensorflow, jax and torch. Received: "
        f"KERAS_BACKEND={_NAME}. Set the environment variable KERAS_BACKEND to one of these three "
        "before importing keras."
    )
backend: Backend = importlib.import_module(f"kmp._backend.{_NAME}").backend
