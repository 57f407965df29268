"""Operations of the architectures as functions of tensors: no modules, no options.

Importing this imports no torch, and a name imports what it needs and nothing else. All of them have
gradients, and each says which shapes it takes; what it cannot take is a :class:`memspan.MemspanError`
of one line. ``implementation="reference"`` is the paper's equation in plain autograd, beside which the
faster ones are tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memspan._lazy import lazily

if TYPE_CHECKING:
    from memspan.ops.convolution import short_convolution as short_convolution
    from memspan.ops.delta_rules.rule import (
        generalized_delta_rule as generalized_delta_rule,
    )
    from memspan.ops.fast_weights.feature_maps import DPFP as DPFP
    from memspan.ops.fast_weights.feature_maps import dpfp as dpfp
    from memspan.ops.fast_weights.feature_maps import elu_plus_one as elu_plus_one
    from memspan.ops.fast_weights.feature_maps import favor as favor
    from memspan.ops.fast_weights.feature_maps import orthogonal_projection as orthogonal_projection
    from memspan.ops.fast_weights.feature_maps import sum_to_one as sum_to_one
    from memspan.ops.fast_weights.rules import Chunking as Chunking
    from memspan.ops.fast_weights.rules import delta_rule as delta_rule
    from memspan.ops.fast_weights.rules import outer_product_rule as outer_product_rule
    from memspan.ops.fast_weights.rules import sum_rule as sum_rule
    from memspan.ops.feedback.attention import Distances as Distances
    from memspan.ops.feedback.attention import feedback_attention as feedback_attention
    from memspan.ops.feedback.attention import span_mask as span_mask
    from memspan.ops.feedback.buffers import FoldedWeights as FoldedWeights
    from memspan.ops.feedback.recurrence import feedback_recurrence as feedback_recurrence
    from memspan.ops.limits import Limits as Limits
    from memspan.ops.relative import Positions as Positions
    from memspan.ops.relative import attention_weights as attention_weights
    from memspan.ops.relative import relative_attention as relative_attention

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "memspan.ops.convolution": ("short_convolution",),
        "memspan.ops.fast_weights.feature_maps": (
            "DPFP",
            "dpfp",
            "elu_plus_one",
            "favor",
            "orthogonal_projection",
            "sum_to_one",
        ),
        "memspan.ops.fast_weights.rules": (
            "Chunking",
            "delta_rule",
            "outer_product_rule",
            "sum_rule",
        ),
        "memspan.ops.feedback.attention": ("Distances", "feedback_attention", "span_mask"),
        "memspan.ops.feedback.buffers": ("FoldedWeights",),
        "memspan.ops.feedback.recurrence": ("feedback_recurrence",),
        "memspan.ops.delta_rules.rule": ("generalized_delta_rule",),
        "memspan.ops.limits": ("Limits",),
        "memspan.ops.relative": ("Positions", "attention_weights", "relative_attention"),
    },
)
