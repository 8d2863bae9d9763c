"""The public ops, one module per subject.

Arrays decide where an op runs: NumPy arrays run the reference in `kernels/reference`, device arrays the kernel in `kernels/numba` or
`kernels/cuda`. Every op launches at most once (`prefill` once or twice, by its method, those of `moe` as they say), never waits, and has a `prepare`
that checks and packs its arguments once. `prefill` by another library's method launches and waits as that does.
"""

from gpukit.kernels import (
    calibration,
    conv,
    decode_step,
    free_list,
    gated_delta,
    gated_delta_prefill,
    gates,
    linear,
    metadata,
    moe,
    norm,
    page_copy,
    page_table,
    residency,
    row_split,
    sliding_window,
    speculative,
    state_pool,
    state_slots,
)

__all__ = [
    "calibration",
    "conv",
    "decode_step",
    "free_list",
    "gated_delta",
    "gated_delta_prefill",
    "gates",
    "linear",
    "metadata",
    "moe",
    "norm",
    "page_copy",
    "page_table",
    "residency",
    "row_split",
    "sliding_window",
    "speculative",
    "state_pool",
    "state_slots",
]
