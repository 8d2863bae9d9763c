"""The gated delta rule by others: flash-linear-attention's fused recurrence, and the formulas in torch."""

from __future__ import annotations

from typing import Any

import torch


def fla_step(inputs: dict[str, Any], state: Any) -> Any:
    """Outputs and new states [B, Hv, K, V] by fla-core's kernel, keys and queries repeated for the value heads as it asks."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(
        inputs["q"], inputs["k"], inputs["v"], inputs["g"], beta=inputs["beta"], initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def torch_step(inputs: dict[str, Any], state: Any) -> Any:
    """Outputs and new states [B, Hv, V, K], token by token."""
    q, k, v = (inputs[name].float() for name in ("q", "k", "v"))
    repeat = v.shape[2] // k.shape[2]
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(repeat, dim=2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        decay = inputs["g"][:, t].exp()[..., None]
        d = inputs["beta"][:, t][..., None] * (v[:, t] - decay * (state @ k[:, t, :, :, None])[..., 0])
        state = decay[..., None] * state + d[..., None] * k[:, t, :, None]
        outputs.append((state @ q[:, t, :, :, None])[..., 0] * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1).to(inputs["v"].dtype), state
