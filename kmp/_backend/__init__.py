"""What differs between backends: the only place that names tf, jax or torch.

`default` has what most of them share; each backend's files have the rest, and what is its own. The
rest of kmp calls them through this package and otherwise knows `keras.ops` alone.
"""

import keras

from kmp._backend.default import (
    after,
    all_reduce_sum,
    are_finite,
    compiled,
    compiled_bytes,
    compiled_step_bytes,
    from_host,
    fused_batch_norm,
    gradient_rows,
    gradient_sample,
    gradient_values,
    inside_xla,
    map_gradient_values,
    multiply,
    per_target,
    preserved,
    read,
    reduce_columns,
    to_host,
    without_functions,
    writes_logs,
)

if keras.backend.backend() == "tensorflow":
    from kmp._backend.tensorflow import (
        after,
        all_reduce_sum,
        compute_if,
        device,
        device_memory,
        gradient_rows,
        gradient_sample,
        gradient_values,
        inside_xla,
        map_gradient_values,
        matmul_float32,
        multiply,
        note_loss,
        per_target,
        platform,
        reduce_columns,
        restore_after_skip,
        run_step,
        verdict,
    )
    from kmp._backend.tensorflow_distribute import writes_logs
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
        after,
        compiled,
        compute_if,
        custom_gradient,
        device,
        device_memory,
        from_host,
        gradient_sample,
        inside_xla,
        matmul_float32,
        note_loss,
        platform,
        read,
        reduce_columns,
        restore_after_skip,
        to_host,
        verdict,
        writes_logs,
    )
    from kmp._backend.jax_masked import run_step
    from kmp._backend.jax_replay import (
        compiled_bytes,
        compiled_step_bytes,
        gradients,
        is_concrete,
        random_state,
        watch_gradient,
        without_functions,
    )
    from kmp._backend.jax_target import per_target
elif keras.backend.backend() == "torch":
    from kmp._backend.torch import (
        are_finite,
        compute_if,
        custom_gradient,
        device,
        device_memory,
        matmul_float32,
        multiply,
        note_loss,
        platform,
        restore_after_skip,
        run_step,
        verdict,
        writes_logs,
    )
    from kmp._backend.torch_replay import gradients, is_concrete, random_state, watch_gradient
else:
    raise ImportError(
        "kmp runs on the Keras backends tensorflow, jax and torch. Received: "
        f"KERAS_BACKEND={keras.backend.backend()}. Set the environment variable KERAS_BACKEND to "
        "one of these three before importing keras."
    )
