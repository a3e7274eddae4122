"""The TensorFlow side of `kmp._backend`."""

from kmp._backend.default import (
    SEES_LOSS,
    are_finite,
    compiled,
    compiled_bytes,
    compiled_step_bytes,
    constant,
    from_host,
    hash_bits,
    pieces,
    segment_sum,
    settle,
    to_host,
)
from kmp._backend.tensorflow.core import (
    END_OF_DATA,
    after,
    all_reduce_sum,
    are_dense,
    around_train_step,
    bitcast,
    compute_if,
    dense,
    device,
    device_memory,
    flags,
    gradient_rows,
    gradient_sample,
    gradient_values,
    inside_xla,
    is_concrete,
    keep_old_unless,
    kept_values,
    map_gradient_values,
    matmul_float32,
    multiply,
    note_loss,
    per_target,
    platform,
    read,
    reduce_columns,
    run_step,
)
from kmp._backend.tensorflow.distribute import (
    writes_logs,
)
from kmp._backend.tensorflow.layers import (
    custom_gradient,
    fused_batch_norm,
    sum_along,
)
from kmp._backend.tensorflow.replay import (
    gradients,
    preserved,
    random_state,
    watch_gradient,
    without_functions,
)
from kmp._backend.tensorflow.views import (
    BaseView,
    retype,
)
