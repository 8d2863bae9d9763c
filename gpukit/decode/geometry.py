"""The shapes of the recurrent models that a decode run can play, and the bytes that a round of one must move.

A model here is its recurrent layers, an embedding and a head: the attention and expert layers between them are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GEOMETRIES", "TAPS", "Geometry"]

# Taps of the convolution; a history is one column less.
TAPS = 4

_BFLOAT16, _FLOAT32 = 2, 4


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
        """Bytes of the weights that a round reads: both projections of every layer, and the head."""
        return _BFLOAT16 * self.hidden * (self.layers * (self.projection + self.values) + self.vocabulary)

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
        """Bytes that a round moves at least: weights once, states `state_passes` times, log and logits written and read.

        Examples
        --------
        >>> GEOMETRIES["qwen3.6-35b-a3b"].round_bytes(1, 4, 3) // 10**6
        2848
        """
        logged = 2 * self.log_bytes * tokens if tokens > 1 else 0
        logits = 2 * _FLOAT32 * self.vocabulary * tokens
        return self.weight_bytes + batch * (state_passes * self.state_bytes + logged + logits)


GEOMETRIES = {
    model.name: model
    for model in (
        Geometry("tiny", layers=2, hidden=128, key_heads=1, value_heads=2, dim=64, vocabulary=512),
        Geometry("qwen3.6-35b-a3b", layers=30, hidden=2048, key_heads=16, value_heads=32, dim=128, vocabulary=151_936),
        Geometry("qwen3.8-27b", layers=48, hidden=5120, key_heads=16, value_heads=48, dim=128, vocabulary=151_936),
    )
}
