"""The shapes of the recurrent models that a decode run can play, and the bytes that a round of one must move.

A model here is its recurrent layers, each with a mixture of experts behind it where the model has them, an embedding and a head: its attention layers
are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpukit.kernels._moe import TOP
from gpukit.kernels.row_split import FORMATS

__all__ = ["EXPERT_FORMATS", "GEOMETRIES", "TAPS", "Geometry", "expert_layer_bytes", "matrix_bytes"]

# Taps of the convolution; a history is one column less.
TAPS = 4
# Formats of the gate and up bank, of the down bank and of the shared expert.
EXPERT_FORMATS = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8", "fp8", "fp8"),
    "q4_q5": ("q4", "q5", "w8"),
    "q6": ("q6", "q6", "w8"),
    "w8": ("w8", "w8", "w8"),
}

_BFLOAT16, _FLOAT32 = 2, 4


def matrix_bytes(rows: int, columns: int, kind: str) -> int:
    """Bytes of a matrix in one of the formats of experts, scales included.

    Examples
    --------
    >>> matrix_bytes(2, 128, "bf16"), matrix_bytes(2, 128, "fp8"), matrix_bytes(2, 128, "q4")
    (512, 264, 136)
    """
    if kind == "bf16":
        return _BFLOAT16 * rows * columns
    if kind == "fp8":
        return rows * (columns + _FLOAT32 * columns // 128)
    group = FORMATS[kind]
    return rows * columns // group.group * (group.base_bytes + group.high_bytes + 2)


def expert_layer_bytes(experts: int, hidden: int, width: int, expert_format: str, routed: float) -> int:
    """Bytes of a layer's router over so many experts, of its shared expert, and of `routed` others, which may be a mean.

    Examples
    --------
    >>> expert_layer_bytes(16, 128, 128, "bf16", 8) - expert_layer_bytes(16, 128, 128, "bf16", 7) == 3 * 128 * 128 * 2
    True
    """
    gate_up, down, shared = EXPERT_FORMATS[expert_format]

    def expert(first: str, second: str) -> int:
        return matrix_bytes(2 * width, hidden, first) + matrix_bytes(hidden, width, second)

    return matrix_bytes(experts + 1, hidden, "bf16") + expert(shared, shared) + round(routed * expert(gate_up, down))


@dataclass(frozen=True)
class Geometry:
    """The shape of a model of gated-delta-rule layers.

    Attributes
    ----------
    name : str
        What the command line calls it.
    layers : int
        Recurrent layers.
    hidden : int
        Width of the residual stream; a multiple of 32.
    key_heads, value_heads : int
        Heads of a layer.
    dim : int
        Width of a key and of a value: 64 or 128.
    vocabulary : int
        Rows of embedding and head.
    experts : int
        Experts behind every layer, eight of which and a shared one a token has; 0 without.
    expert_width : int
        Width of an expert, a multiple of 128 like `hidden`, where there are any.
    expert_format : str
        Format of their weights, one of `EXPERT_FORMATS`.

    Examples
    --------
    >>> model = GEOMETRIES["qwen3.6-35b-a3b"]
    >>> model.channels, model.projection, model.state_bytes
    (8192, 12352, 64389120)
    """

    name: str
    layers: int
    hidden: int
    key_heads: int
    value_heads: int
    dim: int
    vocabulary: int
    experts: int = 0
    expert_width: int = 0
    expert_format: str = "bf16"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.dim

    @property
    def values(self) -> int:
        """Width of all value heads: of the gate beside them, and of what the output projection takes."""
        return self.value_heads * self.dim

    @property
    def projection(self) -> int:
        """Outputs of a layer's first projection: channels, gate, and the two numbers of every value head that become its gates."""
        return self.channels + self.values + 2 * self.value_heads

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that every round reads: both projections of every layer, and the head."""
        return _BFLOAT16 * self.hidden * (self.layers * (self.projection + self.values) + self.vocabulary)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers and of their routers.

        Examples
        --------
        >>> GEOMETRIES["qwen3.6-35b-a3b"].expert_bytes // 10**6
        48538
        """
        return self._expert_bytes(self.experts)

    def read_expert_bytes(self, tokens: int) -> int:
        """Bytes of the experts that so many tokens have, if they choose independently of each other: of E experts, E (1 - (1 - 8 / E)^tokens)."""
        return self._expert_bytes(self.experts * (1 - (1 - TOP / self.experts) ** tokens)) if self.experts else 0

    def _expert_bytes(self, routed: float) -> int:
        """Bytes of routers, shared experts, and so many others in every layer."""
        if not self.experts:
            return 0
        return self.layers * expert_layer_bytes(self.experts, self.hidden, self.expert_width, self.expert_format, routed)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence, histories included."""
        return self.layers * (_FLOAT32 * self.values * self.dim + _BFLOAT16 * (TAPS - 1) * self.channels)

    @property
    def log_bytes(self) -> int:
        """Bytes that a verified token leaves in the log of a round."""
        columns = self.channels + self.key_heads * self.dim + self.values
        return self.layers * (_BFLOAT16 * columns + 2 * _FLOAT32 * self.value_heads)

    def round_bytes(self, batch: int, tokens: int, state_passes: int) -> int:
        """Bytes that a round must move: weights once, states `state_passes` times, log and logits written and read. Of experts as many as tokens have
        that choose independently; those that choose alike have fewer.

        Examples
        --------
        >>> GEOMETRIES["qwen3.6-35b-a3b"].round_bytes(1, 4, 3) // 10**6
        8831
        """
        logged = 2 * self.log_bytes * tokens if tokens > 1 else 0
        logits = 2 * _FLOAT32 * self.vocabulary * tokens
        weights = self.weight_bytes + self.read_expert_bytes(batch * tokens)
        return weights + batch * (state_passes * self.state_bytes + logged + logits)


GEOMETRIES = {
    model.name: model
    for model in (
        Geometry("tiny", layers=2, hidden=128, key_heads=1, value_heads=2, dim=64, vocabulary=512, experts=16, expert_width=128),
        Geometry("qwen3.6-35b-a3b", layers=30, hidden=2048, key_heads=16, value_heads=32, dim=128, vocabulary=151_936, experts=256, expert_width=512),
        Geometry("qwen3.8-27b", layers=48, hidden=5120, key_heads=16, value_heads=48, dim=128, vocabulary=151_936),
    )
}
