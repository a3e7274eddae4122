"""What differs between backends: the only place that names tf, jax or torch.

`plain` has what most of them share; each backend's files have the rest, and what is its own. The
rest of kmp calls them through this package and otherwise knows `keras.ops` alone.
"""

import keras

from kmp._backend.default import (
    END_OF_DATA,
    SEES_LOSS,
    after,
    all_reduce_sum,
    apply,
    are_finite,
    around_train_step,
    compiled,
    compiled_bytes,
    compiled_for,
    compiled_step_bytes,
    fused_batch_norm,
    gradient_rows,
    gradient_sample,
    gradient_values,
    inside_xla,
    keep_old_unless,
    kept_values,
    map_gradient_values,
    multiply,
    preserved,
    read,
    reduce_columns,
    settle,
    step_on_replicas,
    without_functions,
)

if keras.backend.backend() == "tensorflow":
    from kmp._backend.tensorflow import (
        END_OF_DATA,
        after,
        all_reduce_sum,
        apply_if,
        around_train_step,
        compiled_for,
        compute_if,
        device,
        device_memory,
        gradient_rows,
        gradient_sample,
        gradient_values,
        inside_xla,
        keep_old_unless,
        kept_values,
        map_gradient_values,
        matmul_float32,
        multiply,
        note_loss,
        platform,
        reduce_columns,
        verdict,
    )
    from kmp._backend.tensorflow_distribute import step_on_replicas
    from kmp._backend.tensorflow_layers import custom_gradient, fused_batch_norm
    from kmp._backend.tensorflow_replay import (
        gradients,
        is_concrete,
        preserved,
        random_state,
        watch_gradient,
        without_functions,
    )
elif keras.backend.backend() == "jax":
    from kmp._backend.jax import (
        SEES_LOSS,
        after,
        around_train_step,
        compiled,
        compiled_for,
        compute_if,
        custom_gradient,
        device,
        device_memory,
        gradient_sample,
        inside_xla,
        matmul_float32,
        note_loss,
        platform,
        read,
        reduce_columns,
        settle,
        verdict,
    )
    from kmp._backend.jax_masked import apply, apply_if
    from kmp._backend.jax_replay import (
        compiled_bytes,
        compiled_step_bytes,
        gradients,
        is_concrete,
        random_state,
        watch_gradient,
        without_functions,
    )
elif keras.backend.backend() == "torch":
    from kmp._backend.torch import (
        apply_if,
        are_finite,
        compute_if,
        custom_gradient,
        device,
        device_memory,
        kept_values,
        matmul_float32,
        multiply,
        note_loss,
        platform,
        verdict,
    )
    from kmp._backend.torch_replay import gradients, is_concrete, random_state, watch_gradient
else:
    raise ImportError(
        "kmp runs on the Keras backends tensorflow, jax and torch. Received: "
        f"KERAS_BACKEND={keras.backend.backend()}. Set the environment variable KERAS_BACKEND to "
        "one of these three before importing keras."
    )
