"""What differs between backends: the only place that names tf, jax or torch.

`interface.Backend` declares and documents each function. They are bound here by name, to those of
the backend that Keras runs on.
"""

import importlib
from typing import TYPE_CHECKING

import keras

from kmp._backend.interface import Backend
from kmp._backend.one_device import WHOLE as WHOLE
from kmp._backend.one_device import Pieces as Pieces

_NAME = keras.backend.backend()
if _NAME not in ("tensorflow", "jax", "torch"):
    raise ImportError(
        "kmp runs on the Keras backends tensorflow, jax and torch. Received: "
        f"KERAS_BACKEND={_NAME}. Set the environment variable KERAS_BACKEND to one of these three "
        "before importing keras."
    )
_backend: Backend = importlib.import_module(f"kmp._backend.{_NAME}")

if TYPE_CHECKING:  # each of them is held against the interface
    from kmp._backend import jax, tensorflow, torch

    _all: tuple[Backend, Backend, Backend] = (jax, tensorflow, torch)

BaseView = _backend.BaseView
END_OF_DATA = _backend.END_OF_DATA
SEES_LOSS = _backend.SEES_LOSS
after = _backend.after
all_reduce_sum = _backend.all_reduce_sum
are_dense = _backend.are_dense
are_finite = _backend.are_finite
around_train_step = _backend.around_train_step
bitcast = _backend.bitcast
compiled = _backend.compiled
compiled_bytes = _backend.compiled_bytes
compiled_step_bytes = _backend.compiled_step_bytes
compute_if = _backend.compute_if
constant = _backend.constant
custom_gradient = _backend.custom_gradient
dense = _backend.dense
device = _backend.device
device_memory = _backend.device_memory
flags = _backend.flags
from_host = _backend.from_host
fused_batch_norm = _backend.fused_batch_norm
gradient_rows = _backend.gradient_rows
gradient_sample = _backend.gradient_sample
gradient_values = _backend.gradient_values
gradients = _backend.gradients
hash_bits = _backend.hash_bits
inside_xla = _backend.inside_xla
is_concrete = _backend.is_concrete
keep_old_unless = _backend.keep_old_unless
kept_values = _backend.kept_values
map_gradient_values = _backend.map_gradient_values
matmul_float32 = _backend.matmul_float32
multiply = _backend.multiply
note_loss = _backend.note_loss
per_target = _backend.per_target
pieces = _backend.pieces
platform = _backend.platform
preserved = _backend.preserved
random_state = _backend.random_state
read = _backend.read
reduce_columns = _backend.reduce_columns
retype = _backend.retype
run_step = _backend.run_step
segment_sum = _backend.segment_sum
settle = _backend.settle
sum_along = _backend.sum_along
to_host = _backend.to_host
watch_gradient = _backend.watch_gradient
without_functions = _backend.without_functions
writes_logs = _backend.writes_logs
