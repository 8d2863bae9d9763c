"""The gate in front of every measurement: residency changes where lines are, never what is computed. Digests of all outputs say so, or do not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpukit import arrays, checks, devices
from gpukit.arrays import ITEMSIZE
from gpukit.errors import ArgumentError, ArgumentTypeError

__all__ = ["Identity", "compare_outputs", "digest"]


def digest(outputs: Iterable[Any]) -> str:
    """SHA-256 of the bytes of arrays of any library, in their order, after all work of their device. Waits.

    Examples
    --------
    >>> digest([np.arange(3)]) == digest([np.arange(3)]), digest([np.arange(3)]) == digest([np.arange(4)])
    (True, False)
    """
    found = hashlib.sha256()
    for array in outputs:
        pointer, dtype, shape, strides, device, _ = arrays.describe(array, "outputs")
        found.update(f"{dtype}{tuple(shape)}".encode())
        if device < 0:
            found.update(np.ascontiguousarray(array).tobytes())
        elif dtype not in ITEMSIZE:
            raise ArgumentTypeError(f"outputs: expected dtype {', '.join(ITEMSIZE)}, got {dtype}")
        else:
            found.update(_bytes_of(pointer, ITEMSIZE[dtype], tuple(shape), strides, device))
    return found.hexdigest()


def _bytes_of(pointer: int, itemsize: int, shape: tuple[int, ...], strides: Any, device: int) -> bytes:
    """From the first to the last byte of a device array, gaps between strides included."""
    begin, end = arrays.span((pointer, itemsize, shape, arrays.contiguous_strides(shape) if strides is None else tuple(strides)))
    host = np.empty(end - begin, np.uint8)
    bindings = devices.driver()
    with devices.current(device):
        devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")
        if host.nbytes:
            devices.call(bindings.cuMemcpyDtoH(host.ctypes.data, begin, host.nbytes), "cuMemcpyDtoH")
    return host.tobytes()


@dataclass(frozen=True)
class Identity:
    """Digests of every plan on every input.

    Attributes
    ----------
    digests : dict
        ``digests[plan][input]``; the first plan is the reference.
    problems : tuple of str
        What is not as it must be; empty if the gate is passed.
    """

    digests: dict[str, dict[Hashable, str]]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the gate is passed."""
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "; ".join(self.problems)
        first = next(iter(self.digests.values()))
        return f"{len(self.digests)} plans, {len(first)} inputs: the same bits under every plan, others for every input"


def compare_outputs(run: Callable[[str, Any], Iterable[Any]], plans: Sequence[str], inputs: Sequence[Hashable]) -> Identity:
    """Run every plan on every input and compare what came out.

    Parameters
    ----------
    run : callable
        ``run(plan, input)`` starts from that input, runs, and returns everything that was written, as arrays.
    plans : sequence of str
        The first is stock, which is compared with itself before anything else: if that differs, no other comparison means anything.
    inputs : sequence
        At least two that differ, so that outputs that do not depend on the work are found out.

    Returns
    -------
    Identity

    Examples
    --------
    >>> print(compare_outputs(lambda plan, seed: [np.arange(seed)], ["stock", "window"], [3, 4]))
    2 plans, 2 inputs: the same bits under every plan, others for every input
    >>> print(compare_outputs(lambda plan, seed: [np.zeros(3)], ["stock"], [3, 4]))
    stock: 2 inputs, but 1 different outputs
    """
    plans, inputs = checks.texts(plans, "plans"), checks.items(inputs, "inputs")
    if not plans or len(set(inputs)) < 2 or len(set(inputs)) < len(inputs):
        raise ArgumentError(f"plans, inputs: expected at least one plan and two different inputs, got {list(plans)} and {list(inputs)}")
    stock = plans[0]
    digests: dict[str, dict[Hashable, str]] = {stock: {each: digest(run(stock, each)) for each in inputs}}
    again = {each: digest(run(stock, each)) for each in inputs}
    if again != digests[stock]:
        differing = [str(each) for each in inputs if again[each] != digests[stock][each]]
        return Identity(digests, (f"{stock} differs from itself on input {', '.join(differing)}",))
    problems = []
    if (different := len(set(again.values()))) < len(inputs):
        problems.append(f"{stock}: {len(inputs)} inputs, but {different} different outputs")
    for name in plans[1:]:
        digests[name] = {each: digest(run(name, each)) for each in inputs}
        differing = [str(each) for each in inputs if digests[name][each] != again[each]]
        if differing:
            problems.append(f"{name} differs from {stock} on input {', '.join(differing)}")
    return Identity(digests, tuple(problems))
