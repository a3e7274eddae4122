"""The JAX side of `kmp._backend`."""

from kmp._backend.default import (
    END_OF_DATA,
    BaseView,
    all_reduce_sum,
    are_dense,
    are_finite,
    constant,
    dense,
    fused_batch_norm,
    gradient_rows,
    gradient_values,
    hash_bits,
    keep_old_unless,
    kept_values,
    map_gradient_values,
    multiply,
    preserved,
    retype,
    segment_sum,
    sum_along,
)
from kmp._backend.jax.core import (
    SEES_LOSS,
    after,
    around_train_step,
    bitcast,
    compiled,
    compute_if,
    custom_gradient,
    device,
    device_memory,
    flags,
    from_host,
    gradient_sample,
    inside_xla,
    known,
    matmul_float32,
    note_loss,
    platform,
    read,
    reduce_columns,
    settle,
    to_host,
    writes_logs,
)
from kmp._backend.jax.masked import (
    run_step,
)
from kmp._backend.jax.replay import (
    compiled_bytes,
    compiled_step_bytes,
    gradients,
    is_concrete,
    random_state,
    watch_gradient,
    without_functions,
)
from kmp._backend.jax.target import (
    per_target,
)
