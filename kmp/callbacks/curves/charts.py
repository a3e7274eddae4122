"""The charts of `GradientHealth` in TensorBoard: how they are arranged, and what each one shows."""

from typing import Any

from kmp.callbacks.verdict.states import STATES

_STATES = ", ".join(f"{i} {state}" for i, state in enumerate(STATES))

# By page and title: the tags that a chart shows. Each tag has its words in `DESCRIPTIONS`.
LAYOUT: dict[str, dict[str, Any]] = {
    "Mixed precision": {
        "loss scale, log2": ["mixed_precision/loss_scale_log2$"],
        "loss of each epoch": ["epoch_loss$"],
        "skipped steps": ["mixed_precision/skipped_steps$"],
        "headroom, bits": ["mixed_precision/headroom_bits$"],
        "float16: % of the gradient degraded, lost": ["mixed_precision/(degraded|lost)_pct$"],
        f"verdict: {_STATES}": ["mixed_precision/verdict$"],
    },
    "Gradient health": {
        "global norm": ["grad/global_norm$"],
        "norm of each variable": ["variable_grad_norm/.*"],
        "log10 of update / weight: median and range, healthy near -3": {
            "value": "update_ratio/median",
            "lower": "update_ratio/min",
            "upper": "update_ratio/max",
        },
        "log10 of update / weight, each variable": ["variable_update_ratio/.*"],
        "overflows of each variable": ["variable_overflow_steps/.*"],
    },
}

# A page more for an optimizer that leaves out spikes.
SPIKES: dict[str, dict[str, Any]] = {
    "Spikes": {
        "global norm, and the limit above which a step is left out": [
            "grad/global_norm$",
            "spikes/limit$",
        ],
        "steps left out as spikes, steps whose batch statistics were held": [
            "spikes/count$",
            "spikes/held_statistics$",
        ],
    },
}

# By the tag of a chart, or by what all tags of a group begin with.
DESCRIPTIONS = {
    "mixed_precision/loss_scale": "What the loss of the next step is multiplied by.",
    "mixed_precision/loss_scale_log2": "The loss scale as a power of two. A saw-tooth at any "
    "height is healthy, a steady fall is not.",
    "mixed_precision/skipped_steps": "Steps skipped since training began, because a gradient was "
    "not finite, or as a spike. A few at the beginning are how the loss scale is found.",
    "spikes/count": "Steps left out since training began, because their gradients were finite and "
    "far larger than the largest lately.",
    "spikes/score": "The share of all steps so far that were left out as spikes.",
    "spikes/limit": "The largest norm of the next step's gradient that is not a spike.",
    "spikes/held_statistics": "Steps so far that would have multiplied a moving variance, and left "
    "all batch statistics as they were.",
    "mixed_precision/consecutive_skips": "Overflows in a row up to now.",
    "mixed_precision/headroom_bits": "How often the loss scale could double before the largest "
    "gradient leaves float16.",
    "mixed_precision/degraded_pct": "Percent of the non-zero gradient that has fewer bits in "
    "float16 at this loss scale; mean of the variables.",
    "mixed_precision/lost_pct": "Percent of the non-zero gradient that float16 rounds to zero at "
    "this loss scale; mean of the variables.",
    "mixed_precision/unmoved_pct": "Percent of the non-zero gradient whose weight the step did not "
    "change; mean of the variables.",
    "mixed_precision/verdict": f"The worst verdict since the last epoch's end: {_STATES}.",
    "mixed_precision/report": "The verdict, and the gradients to look at first, at this step.",
    "mixed_precision/variables": "The gradient of each variable at this step.",
    "grad/global_norm": "l2 norm of the gradient over all variables, divided by the loss scale.",
    "grad/max_abs": "Largest absolute value of any gradient, divided by the loss scale.",
    "update_ratio/median": "log10 of the update's norm over the weight's norm, the median of the "
    "matrices. Healthy near -3.",
    "update_ratio/min": "log10 of the update's norm over the weight's norm, the smallest.",
    "update_ratio/max": "log10 of the update's norm over the weight's norm, the largest.",
    "heatmap/log10_grad_norm": "The norm of each variable's gradient over time. Red: the variable "
    "has overflowed since the look before.",
    "variable_grad_norm/": "l2 norm of the variable's gradient, divided by the loss scale.",
    "variable_grad_max_abs/": "Largest absolute value of the variable's gradient, divided by the "
    "loss scale.",
    "variable_grad_zero_share/": "Share of the variable's gradient that is exactly zero.",
    "variable_grad_exponent/": "Exponents (log2) of the scaled gradient, of a sample. float16 has "
    "full precision from -14 to 16, and rounds what is below -25 to zero.",
    "variable_overflow_steps/": "Steps in which the variable's gradient was not finite.",
    "variable_weight_norm/": "l2 norm of the variable, estimated from a sample.",
    "variable_update_ratio/": "log10 of the update's norm over the weight's norm. Healthy near -3.",
    "epoch_": "The entry of this name in the logs of each epoch.",
    "epoch_loss": "Mean loss of the epoch, over the steps that were not skipped.",
    "epoch_learning_rate": "The optimizer's learning rate at the end of the epoch.",
    "epoch_loss_scale": "The loss scale at the end of the epoch.",
    "epoch_skipped_steps": "Steps skipped since training began.",
    "epoch_grad_norm": "l2 norm of the gradient of the epoch's last step, over all variables.",
    "epoch_verdict": f"The worst verdict of the epoch: {_STATES}.",
}
