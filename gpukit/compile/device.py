"""What device code in Numba is written with: `cuda`, the kernel decorator, atomics on pointers, and block-wide prefix sums.

The only importer of numba.cuda. `cuda.atomic` refuses raw pointers, so the atomics are intrinsics over the same LLVM instructions; they also
take arrays, so that every kernel works as an ordinary dispatcher. In the simulator they are Python functions under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
from numba import cuda
from numba.cuda import config as _config

__all__ = [
    "BLOCK",
    "EXHAUSTED",
    "MISMATCH",
    "OCCUPIED",
    "OUT_OF_RANGE",
    "REBOUND",
    "UNBOUND",
    "KernelSource",
    "atomic_add",
    "atomic_compare_exchange",
    "atomic_exchange",
    "count",
    "cuda",
    "device_function",
    "exclusive_scan",
    "fresh_scan",
    "fresh_scan_and_sums",
    "inclusive_max",
    "int64",
    "is_null",
    "kernel",
    "load_word",
    "misaligned_by",
    "uint32",
]

int64 = numba.int64
uint32 = numba.uint32

# Slots of a Signal's counters, in the order of errors.SIGNAL_KINDS.
OUT_OF_RANGE, UNBOUND, REBOUND, OCCUPIED, MISMATCH, EXHAUSTED = range(6)

# Threads of a block that uses `exclusive_scan`.
BLOCK = 256

SIMULATED = bool(_config.ENABLE_CUDASIM)

device_functions: list[Any] = []


class KernelSource:
    """A kernel's Python function and its declared parameters: dtype words, a ``*`` for pointers, other names for type variables."""

    def __init__(self, function: Callable[..., None], parameters: dict[str, str]):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if names != tuple(parameters):
            raise TypeError(f"kernel {function.__name__}: declared parameters {tuple(parameters)} are not those of the function {names}")
        self.function = function
        self.parameters = parameters
        words = dict.fromkeys(text.rstrip("*") for text in parameters.values())
        self.type_variables = tuple(word for word in words if not hasattr(numba.types, word))

    def dispatcher(self) -> Any:
        """The kernel as an ordinary Numba dispatcher (or simulator kernel): ``source.dispatcher()[grid, block](arrays…)``."""
        return cuda.jit(self.function)


def kernel(**parameters: str) -> Callable[[Callable[..., None]], KernelSource]:
    """Declare a kernel: one keyword per parameter, in order."""
    return lambda function: KernelSource(function, parameters)


def device_function(function: Callable[..., Any]) -> Any:
    """A function that kernels call; inlined by the compiler."""
    dispatcher = cuda.jit(device=True)(function)
    device_functions.append(dispatcher)
    return dispatcher


if SIMULATED:
    _atomics = threading.Lock()

    def atomic_add(pointer: Any, index: int, value: int) -> int:
        with _atomics:
            old = pointer[index]
            pointer[index] = old + value
            return int(old)

    def atomic_exchange(pointer: Any, index: int, value: int) -> int:
        with _atomics:
            old = pointer[index]
            pointer[index] = value
            return int(old)

    def atomic_compare_exchange(pointer: Any, index: int, expected: int, value: int) -> int:
        with _atomics:
            old = pointer[index]
            if old == expected:
                pointer[index] = value
            return int(old)

    def is_null(pointer: Any) -> bool:
        return pointer is None

    def misaligned_by(pointer: Any) -> int:
        return int(pointer.address) & 7

    def load_word(pointer: Any, index: int) -> int:
        return int.from_bytes(bytes(int(pointer[index + byte]) for byte in range(8)), "little", signed=True)

    def count(signal: Any, kind: int, amount: int) -> None:
        if signal is not None:
            atomic_add(signal, kind, amount)

    @device_function
    def exclusive_scan(scratch: Any, value: int) -> Any:
        """The same contract without warp operations, which the simulator lacks."""
        cuda.syncthreads()
        return fresh_scan(scratch, value)

    @device_function
    def fresh_scan(scratch: Any, value: int) -> Any:
        """The same contract."""
        thread = cuda.threadIdx.x
        scratch[thread] = value
        cuda.syncthreads()
        return int(scratch[:thread].sum()), int(scratch[:BLOCK].sum())

    @device_function
    def fresh_scan_and_sums(scratch: Any, value: int, first: int, second: int, third: int) -> Any:
        """The same contract."""
        thread = cuda.threadIdx.x
        for part, number in enumerate((value, first, second, third)):
            scratch[part * BLOCK + thread] = number
        cuda.syncthreads()
        sums = [int(scratch[part * BLOCK : (part + 1) * BLOCK].sum()) for part in range(4)]
        return int(scratch[:thread].sum()), *sums

    @device_function
    def inclusive_max(scratch: Any, value: int) -> Any:
        """The same contract without warp operations."""
        thread = cuda.threadIdx.x
        cuda.syncthreads()
        scratch[thread] = value
        cuda.syncthreads()
        return int(scratch[: thread + 1].max()), int(scratch[:BLOCK].max())

else:
    from numba import types
    from numba.cuda import cgutils
    from numba.cuda.extending import intrinsic

    def _address(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
        if isinstance(kind, types.Array):
            value = context.make_array(kind)(context, builder, value).data
        return builder.gep(value, [index])

    def _element(pointer: Any) -> Any:
        return pointer.dtype if isinstance(pointer, types.CPointer | types.Array) else None

    def _read_modify_write(operation: str) -> Any:
        @intrinsic
        def atomic(typing_context: Any, pointer: Any, index: Any, value: Any) -> Any:
            element = _element(pointer)

            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                address = _address(context, builder, signature.args[0], arguments[0], arguments[1])
                return builder.atomic_rmw(operation, address, arguments[2], "monotonic")

            return element(pointer, types.int64, element), generate

        return atomic

    atomic_add = _read_modify_write("add")
    atomic_exchange = _read_modify_write("xchg")

    @intrinsic
    def atomic_compare_exchange(typing_context: Any, pointer: Any, index: Any, expected: Any, value: Any) -> Any:
        """Store `value` at `pointer[index]` if it holds `expected`; the old value either way."""
        element = _element(pointer)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = _address(context, builder, signature.args[0], arguments[0], arguments[1])
            return builder.extract_value(builder.cmpxchg(address, arguments[2], arguments[3], "monotonic", "monotonic"), 0)

        return element(pointer, types.int64, element, element), generate

    @intrinsic
    def is_null(typing_context: Any, pointer: Any) -> Any:
        """Whether an optional pointer was left out. An array never is."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if isinstance(signature.args[0], types.Array):
                return cgutils.false_bit
            return cgutils.is_null(builder, arguments[0])

        return types.boolean(pointer), generate

    @intrinsic
    def misaligned_by(typing_context: Any, pointer: Any) -> Any:
        """How many bytes an address lies behind a multiple of eight."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = _address(context, builder, signature.args[0], arguments[0], context.get_constant(types.int64, 0))
            number = builder.ptrtoint(address, context.get_value_type(types.int64))
            return builder.and_(number, context.get_constant(types.int64, 7))

        return types.int64(pointer), generate

    @intrinsic
    def load_word(typing_context: Any, pointer: Any, index: Any) -> Any:
        """The eight bytes at an element of a byte array, as one int64; the address must be a multiple of eight."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = _address(context, builder, signature.args[0], arguments[0], arguments[1])
            return builder.load(builder.bitcast(address, context.get_value_type(types.int64).as_pointer()))

        return types.int64(pointer, types.int64), generate

    @device_function
    def count(signal: Any, kind: int, amount: int) -> None:
        """Add to a signal's counter, if there is a signal."""
        if not is_null(signal):
            atomic_add(signal, kind, amount)

    @device_function
    def exclusive_scan(scratch: Any, value: int) -> Any:
        """Sum of `value` over the threads before this one, and over all `BLOCK` threads of the block. `scratch`: shared int64 [BLOCK].

        Every thread of the block must call it; `scratch` is free again after the block's next barrier.
        """
        # The barrier in front frees the scratch of an earlier scan.
        cuda.syncthreads()
        return fresh_scan(scratch, value)

    @device_function
    def _warp_scan(value: int) -> int:
        lane = cuda.threadIdx.x & 31
        distance = 1
        while distance < 32:
            before = cuda.shfl_up_sync(0xFFFFFFFF, value, distance)
            if lane >= distance:
                value += before
            distance *= 2
        return value

    @device_function
    def _warp_sum(value: int) -> int:
        distance = 16
        while distance > 0:
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)
            distance //= 2
        return value

    @device_function
    def fresh_scan(scratch: Any, value: int) -> Any:
        """The same with one barrier: for `scratch` that nobody has used since the block's last one."""
        warp = cuda.threadIdx.x >> 5
        inclusive = _warp_scan(value)
        if cuda.threadIdx.x & 31 == 31:
            scratch[warp] = inclusive
        cuda.syncthreads()
        offset, total = int64(0), int64(0)
        for other in range(BLOCK // 32):
            if other < warp:
                offset += scratch[other]
            total += scratch[other]
        return offset + inclusive - value, total

    @device_function
    def fresh_scan_and_sums(scratch: Any, value: int, first: int, second: int, third: int) -> Any:
        """The same beside the sums of three more values over the block, all behind one barrier. `scratch`: shared int64 [4 * BLOCK]."""
        warp = cuda.threadIdx.x >> 5
        first, second, third = _warp_sum(first), _warp_sum(second), _warp_sum(third)
        if cuda.threadIdx.x & 31 == 31:
            scratch[BLOCK + warp] = first
            scratch[2 * BLOCK + warp] = second
            scratch[3 * BLOCK + warp] = third
        before, total = fresh_scan(scratch, value)
        first, second, third = int64(0), int64(0), int64(0)
        for other in range(BLOCK // 32):
            first += scratch[BLOCK + other]
            second += scratch[2 * BLOCK + other]
            third += scratch[3 * BLOCK + other]
        return before, total, first, second, third

    @device_function
    def inclusive_max(scratch: Any, value: int) -> Any:
        """Largest `value` of the threads up to this one, and of all `BLOCK` threads; values are not negative. Rules of `exclusive_scan`."""
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        highest = value
        distance = 1
        while distance < 32:
            # Lanes without a partner get their own value back.
            highest = max(highest, cuda.shfl_up_sync(0xFFFFFFFF, highest, distance))
            distance *= 2
        cuda.syncthreads()
        if lane == 31:
            scratch[warp] = highest
        cuda.syncthreads()
        overall = int64(0)
        for other in range(BLOCK // 32):
            if other < warp:
                highest = max(highest, scratch[other])
            overall = max(overall, scratch[other])
        return highest, overall
