"""Kernel census: every kernel that a callable or a graph ran, with counts and medians, by the framework's profiler.

Comparing two censuses is `census_diff`'s job. The profiler is torch's (CUPTI behind it); without torch a census is refused by name.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gpukit import devices
from gpukit.errors import DeviceError
from gpukit.measure.census_diff import KernelCount

__all__ = ["census"]


def census(call: Callable[[], Any], *, device: int = 0, warmup: int = 3) -> dict[str, KernelCount]:
    """Count the kernels of one call.

    Parameters
    ----------
    call : callable
        Enqueues work and returns; a graph's `launch` for the kernels of a graph. Called `warmup` times before it is observed once.
    device : int
        Ordinal of the device to wait for.
    warmup : int
        Unobserved calls.

    Returns
    -------
    dict of str to KernelCount
        All kernels by name, those of other libraries too.

    Raises
    ------
    DeviceError
        No driver, or no torch to profile with.
    """
    bindings = devices.driver()
    try:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        raise DeviceError(f"a census needs torch's profiler ({error})") from None

    def synchronize() -> None:
        with devices.current(device):
            devices.call(bindings.cuCtxSynchronize(), "cuCtxSynchronize")

    for _ in range(warmup):
        call()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as observed:
        call()
        synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in observed.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(float(event.device_time))
    return {name: KernelCount(len(samples), statistics.median(samples)) for name, samples in times.items()}
