"""What a sparse mixture of experts is made of, and what its arrays must look like."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from gpukit.arrays import describe
from gpukit.errors import ArgumentError, ArgumentTypeError
from gpukit.kernels._row_split import FORMATS, RowSplit, planes
from gpukit.kernels._tensors import BF16, require_aligned, tensor

__all__ = ["TOP", "Fp8", "Geometry", "MoeWeights", "geometry_of"]

# Routed experts of a token.
TOP = 8
_LEAST_EXPERTS, _MOST_EXPERTS = TOP, 256
# Sizes are multiples of what a scale of fp8 covers, which all other units divide.
_UNIT = 128
_MOST_STEPS = 2**31
_STEP = 32
# Of an element in the largest plane.
_BITS = {"bf16": 16, "fp8": 8, "q4": 4, "q5": 4, "q6": 4, "w8": 8}
_FP8 = ("float8_e4m3fn", "uint8")
# Where weights keep what they were when they were checked last.
_CHECKED = "_checked"


@dataclass(frozen=True)
class Fp8:
    """A matrix of 8-bit floats with a scale for every 128 elements of a row.

    Parameters
    ----------
    codes : float8_e4m3fn (or uint8 for it) array, shape (rows, K)
        Finite numbers; what the two NaN patterns give is not said.
    scales : float32 array, shape (rows, K / 128)
        What they are multiplied by.

    Examples
    --------
    >>> Fp8(np.zeros((2, 256), np.uint8), np.ones((2, 2), np.float32)).scales.shape
    (2, 2)
    """

    codes: Any
    scales: Any


@dataclass(frozen=True)
class MoeWeights:
    """The weights of a sparse mixture of experts of E experts, hidden size H and expert width I, with one shared expert or none.

    A matrix is a bfloat16 (or uint16) array, an `Fp8` or a `RowSplit`; all are contiguous and at multiples of 16.

    Parameters
    ----------
    router : bfloat16 (or uint16) array, shape (E, H), or (E + 1, H) with a shared expert
        One row an expert; the last row is the gate of the shared expert. E is 8 … 256, H and I are multiples of 128.
    gate_up : matrix, shape (E * 2 * I, H)
        Row ``e * 2 * I + p * I + r``: p is 0 for the gate and 1 for the up projection.
    down : matrix, shape (E * H, I)
        Row ``e * H + h``.
    shared_gate_up, shared_down : matrix, shapes (2 * I, H) and (H, I), optional
        The shared expert, both or none, in the format of `gate_up` or `down`; or in "w8", where that is "q4", "q5" or "q6".

    Examples
    --------
    >>> weights = MoeWeights(np.zeros((8, 128), np.uint16), np.zeros((8 * 256, 128), np.uint16), np.zeros((8 * 128, 128), np.uint16))
    >>> weights.shared_down is None
    True
    """

    router: Any
    gate_up: Any
    down: Any
    shared_gate_up: Any = None
    shared_down: Any = None


# Addresses of a matrix: base, high, scales; 0 for what its format has not.
Bank = tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a mixture of experts, the formats of its two banks, and where its matrices are."""

    experts: int
    hidden: int
    width: int
    paths: int  # of a token: its routed experts and the shared one
    gate_up_format: str
    down_format: str
    router: int
    gate_up: Bank
    down: Bank
    shared_gate_up: Bank
    shared_down: Bank
    is_gate_up_other: bool  # whether the shared expert is in another format
    is_down_other: bool
    shared_gate_up_bytes: int  # of the plane that is not small
    shared_down_bytes: int

    @property
    def has_shared(self) -> bool:
        """Whether there is a shared expert."""
        return self.paths > TOP


def may_have_other(kind: str) -> bool:
    """Whether the shared expert may be in eight bits beside routed experts in a format of fewer."""
    return kind in FORMATS and kind != "w8"


def matrix_format(matrix: Any) -> str:
    """Name of a matrix's format."""
    if isinstance(matrix, RowSplit):
        return matrix.format
    return "fp8" if isinstance(matrix, Fp8) else "bf16"


def _bank(matrix: Any, name: str, rows: int, columns: int, device: int) -> tuple[str, Bank]:
    """Check a matrix of known size."""
    kind = matrix_format(matrix)
    if kind in FORMATS:
        return kind, planes(matrix, name, rows, columns, device)
    if kind == "fp8":
        codes_at = _plain(matrix.codes, f"{name}.codes", _FP8, (rows, columns), device)
        return kind, (codes_at, 0, _plain(matrix.scales, f"{name}.scales", ("float32",), (rows, columns // _UNIT), device))
    return kind, (_plain(matrix, name, BF16, (rows, columns), device), 0, 0)


def _plain(array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int, int], device: int | None) -> int:
    address, found, _, _, _ = tensor(array, name, dtypes, (2,), device, contiguous=2)
    if found != shape:
        raise ArgumentError(f"{name}: expected shape {shape}, got {found}")
    require_aligned(name, address)
    return address


def _rows(matrix: Any, name: str) -> int:
    """Rows of a matrix whose size is not known yet."""
    whole, name = (matrix.scales, f"{name}.scales") if isinstance(matrix, Fp8 | RowSplit) else (matrix, name)
    shape = describe(whole, name)[2]
    if len(shape) != 2:
        raise ArgumentError(f"{name}: expected 2 dimensions, got shape {tuple(shape)}")
    return int(shape[0])


def geometry_of(weights: Any, device: int | None = None) -> Geometry:
    """Check all weights, on a device, if it is known. What has been checked and looks as it did then is not checked again."""
    if not isinstance(weights, MoeWeights):
        raise ArgumentTypeError(f"weights: expected a MoeWeights, got {type(weights).__name__}")
    known = vars(weights).get(_CHECKED)
    if known is not None:
        arrays, looks, geometry = known
        if (device is None or device == looks[0][4]) and [describe(array) for array in arrays] == looks:
            return cast(Geometry, geometry)
    geometry = _check(weights, device)
    arrays = _arrays(weights)
    # Beside the fields, which are all that makes weights equal.
    object.__setattr__(weights, _CHECKED, (arrays, [describe(array) for array in arrays], geometry))
    return geometry


def _arrays(weights: Any) -> list[Any]:
    """All arrays of weights, the router first."""
    parts = [getattr(weights, field.name) for field in fields(weights)]
    nested = [_arrays(part) if isinstance(part, Fp8 | RowSplit) else [part] for part in parts if part is not None and not isinstance(part, str)]
    return [array for part in nested for array in part]


def _check(weights: MoeWeights, device: int | None) -> Geometry:
    has_shared = weights.shared_gate_up is not None
    if has_shared != (weights.shared_down is not None):
        raise ArgumentError("weights.shared_down: expected a matrix with weights.shared_gate_up, and only then")
    _, (rows, hidden), _, _, device = tensor(weights.router, "weights.router", BF16, (2,), device, contiguous=2)
    experts = router_experts(rows, has_shared, "weights.router")
    router_at = _plain(weights.router, "weights.router", BF16, (rows, hidden), device)
    rows_of_gate_up = _rows(weights.gate_up, "weights.gate_up")
    width, left = divmod(rows_of_gate_up, 2 * experts)
    if left or width == 0 or width % _UNIT:
        source = "the rows of weights.router" + ", less the shared expert's gate" * has_shared
        wanted = f"{experts} times two times a multiple of {_UNIT} rows ({experts} experts: {source})"
        raise ArgumentError(f"weights.gate_up: expected {wanted}, got {rows_of_gate_up}")
    if hidden == 0 or hidden % _UNIT:
        raise ArgumentError(f"weights.router: expected rows of a multiple of {_UNIT} elements, got {hidden}")
    if experts * max(2 * width * hidden, hidden * width) // _STEP >= _MOST_STEPS:
        raise ArgumentError(f"weights.gate_up: expected less than {_MOST_STEPS * _STEP} elements, got {experts * 2 * width * hidden}")
    gate_up_format, gate_up = _bank(weights.gate_up, "weights.gate_up", experts * 2 * width, hidden, device)
    down_format, down = _bank(weights.down, "weights.down", experts * hidden, width, device)
    shared_gate_up = shared_down = (0, 0, 0)
    other, sizes = [False, False], [0, 0]
    if has_shared:
        format_of_gate_up, shared_gate_up = _bank(weights.shared_gate_up, "weights.shared_gate_up", 2 * width, hidden, device)
        format_of_down, shared_down = _bank(weights.shared_down, "weights.shared_down", hidden, width, device)
        pairs = (("gate_up", gate_up_format, format_of_gate_up), ("down", down_format, format_of_down))
        for name, routed, shared in pairs:
            allowed = (routed, "w8") if may_have_other(routed) else (routed,)
            if shared not in allowed:
                raise ArgumentTypeError(f"weights.shared_{name}: expected format {' or '.join(allowed)} beside {routed}, got {shared}")
        other = [routed != shared for _, routed, shared in pairs]
        sizes = [rows * hidden * width * _BITS[kind] // 8 for rows, kind in ((2, format_of_gate_up), (1, format_of_down))]
    return Geometry(
        experts, hidden, width, TOP + has_shared, gate_up_format, down_format, router_at, gate_up, down, shared_gate_up, shared_down, *other, *sizes
    )


def router_experts(rows: int, has_shared: bool, name: str) -> int:
    """Experts of a router with so many rows."""
    experts = rows - has_shared
    if not _LEAST_EXPERTS <= experts <= _MOST_EXPERTS:
        rows_of_shared = " and one for the shared expert" if has_shared else ""
        raise ArgumentError(f"{name}: expected {_LEAST_EXPERTS} to {_MOST_EXPERTS} rows{rows_of_shared}, got {rows}")
    return experts
