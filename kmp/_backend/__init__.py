"""What differs between backends, one file each: the only place that names tf, jax or torch.

Every backend file offers the same functions; the rest of kmp calls them through this package and
otherwise knows `keras.ops` alone.
"""

import keras

if keras.backend.backend() == "tensorflow":
    from kmp._backend.tensorflow import (
        after,
        all_reduce_sum,
        apply_if,
        by_device,
        compiled,
        compute_if,
        device,
        device_memory,
        gradient_rows,
        gradient_sample,
        gradient_values,
        map_gradient_values,
        matmul_float32,
        note_loss,
        platform,
        read,
        reduce_columns,
        restore_after_skip,
        select_if,
        verdict,
    )
    from kmp._backend.tensorflow_distribute import step_on_replicas
    from kmp._backend.tensorflow_layers import custom_gradient, fused_batch_norm
    from kmp._backend.tensorflow_replay import (
        compiled_bytes,
        compiled_step_bytes,
        gradients,
        is_concrete,
        random_state,
        watch_gradient,
    )
elif keras.backend.backend() == "jax":
    from kmp._backend.dense_gradients import (
        gradient_rows,
        gradient_values,
        map_gradient_values,
    )
    from kmp._backend.jax import (
        after,
        all_reduce_sum,
        apply_if,
        by_device,
        compiled,
        compute_if,
        custom_gradient,
        device,
        device_memory,
        fused_batch_norm,
        gradient_sample,
        matmul_float32,
        note_loss,
        platform,
        read,
        reduce_columns,
        restore_after_skip,
        select_if,
        step_on_replicas,
        verdict,
    )
    from kmp._backend.jax_replay import (
        compiled_bytes,
        compiled_step_bytes,
        gradients,
        is_concrete,
        random_state,
        watch_gradient,
    )
elif keras.backend.backend() == "torch":
    from kmp._backend.dense_gradients import (
        gradient_rows,
        gradient_sample,
        gradient_values,
        map_gradient_values,
    )
    from kmp._backend.reductions import reduce_apart as reduce_columns
    from kmp._backend.torch import (
        after,
        all_reduce_sum,
        apply_if,
        by_device,
        compiled,
        compute_if,
        custom_gradient,
        device,
        device_memory,
        fused_batch_norm,
        matmul_float32,
        note_loss,
        platform,
        read,
        restore_after_skip,
        select_if,
        step_on_replicas,
        verdict,
    )
    from kmp._backend.torch_replay import (
        compiled_bytes,
        compiled_step_bytes,
        gradients,
        is_concrete,
        random_state,
        watch_gradient,
    )
else:
    raise ImportError(
        "kmp runs on the Keras backends tensorflow, jax and torch. Received: "
        f"KERAS_BACKEND={keras.backend.backend()}. Set the environment variable KERAS_BACKEND to "
        "one of these three before importing keras."
    )

__all__ = [
    "after",
    "all_reduce_sum",
    "apply_if",
    "by_device",
    "compiled",
    "compiled_bytes",
    "compiled_step_bytes",
    "compute_if",
    "custom_gradient",
    "device",
    "device_memory",
    "fused_batch_norm",
    "gradient_rows",
    "gradient_sample",
    "gradient_values",
    "gradients",
    "is_concrete",
    "map_gradient_values",
    "matmul_float32",
    "note_loss",
    "platform",
    "random_state",
    "read",
    "reduce_columns",
    "restore_after_skip",
    "select_if",
    "step_on_replicas",
    "verdict",
    "watch_gradient",
]
