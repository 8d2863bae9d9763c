"""Which bytes to keep in the L2, and whether the device can: regions, windows, plans with the guard, and recipes. It calls no driver.

A *recipe* says what to try without saying where: it is data, and survives its process. On regions of memory and a device's properties it becomes
a *plan*: a window with base, size and ratio, and a reserve. `install` puts plans on streams and graphs; `reservation` owns the reserve.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gpukit import arrays, devices
from gpukit.arrays import ITEMSIZE
from gpukit.devices import DeviceProperties
from gpukit.errors import ArgumentError

__all__ = ["STOCK", "AccessWindow", "Plan", "Recipe", "Region", "load_plan", "plan"]

# What a line inside a window may be; a missed one must not be persisting.
HITS = ("persisting", "normal", "streaming")
MISSES = ("normal", "streaming")


@dataclass(frozen=True)
class AccessWindow:
    """An access-policy window: what the L2 does with the lines of a stretch of memory.

    Attributes
    ----------
    base, size : int
        Address and bytes.
    ratio : float
        Share of the lines that get `hit`; the others get `miss`.
    hit : {"persisting", "normal", "streaming"}
    miss : {"normal", "streaming"}

    Raises
    ------
    ArgumentError
        A value that no window can have.

    Examples
    --------
    >>> AccessWindow(4096, 1 << 20, 0.5)
    AccessWindow(base=4096, size=1048576, ratio=0.5, hit='persisting', miss='normal')
    """

    base: int
    size: int
    ratio: float = 1.0
    hit: str = "persisting"
    miss: str = "normal"

    def __post_init__(self) -> None:
        if self.size < 1 or self.base < 0:
            raise ArgumentError(f"window: expected an address and at least 1 byte, got {self.base:#x} and {self.size}")
        if not 0.0 <= self.ratio <= 1.0:
            raise ArgumentError(f"ratio: expected a number from 0 to 1, got {self.ratio}")
        if self.hit not in HITS or self.miss not in MISSES:
            raise ArgumentError(f"hit, miss: expected one of {', '.join(HITS)} and one of {', '.join(MISSES)}, got {self.hit} and {self.miss}")


@dataclass(frozen=True)
class Region:
    """A stretch of device memory, and which of its bytes are in use.

    Attributes
    ----------
    base, size : int
        Address and bytes.
    live : tuple of (offset, size)
        Parts that a round touches; all of it when empty. The others are dead: holding them gains nothing.

    Examples
    --------
    >>> Region(4096, 1000, live=((0, 100), (500, 100))).live_bytes
    200
    """

    base: int
    size: int
    live: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for offset, size in self.live:
            if offset < end or size < 1 or offset + size > self.size:
                raise ArgumentError(f"live: expected parts inside {self.size} bytes in ascending order, apart from each other, got {self.live}")
            end = offset + size

    @classmethod
    def of(cls, array: Any, live: tuple[tuple[int, int], ...] = ()) -> Region:
        """The memory from the first to the last byte of an array of any library; gaps between strides are part of it.

        Examples
        --------
        >>> import numpy as np
        >>> Region.of(np.zeros((4, 8), np.int64)[:, ::2]).size
        248
        """
        pointer, dtype, shape, strides, _, _ = arrays.describe(array)
        strides = arrays.contiguous_strides(shape) if strides is None else strides
        begin, end = arrays.span((pointer, ITEMSIZE[dtype], tuple(shape), tuple(strides)))
        return cls(begin, end - begin, live)

    @property
    def live_bytes(self) -> int:
        """Bytes in use."""
        return sum(size for _, size in self.live) if self.live else self.size

    def live_in(self, window: AccessWindow) -> int:
        """Bytes in use that lie inside a window."""
        begin, end = window.base, window.base + window.size
        parts = self.live or ((0, self.size),)
        return sum(max(0, min(end, self.base + offset + size) - max(begin, self.base + offset)) for offset, size in parts)

    def held_share(self, window: AccessWindow, reserve: int) -> float:
        """Share of the bytes in use that a window holds under a reserve; with dead bytes between them, these take their part of it.

        Examples
        --------
        >>> two_slots = Region(0, 400, live=((0, 100), (200, 100)))
        >>> two_slots.held_share(AccessWindow(0, 400, 0.25), reserve=100)
        0.25
        """
        if not self.live_bytes or window.hit != "persisting":
            return 0.0
        return min(window.ratio, reserve / window.size) * self.live_in(window) / self.live_bytes


@dataclass(frozen=True)
class Plan:
    """What will be done: a window, a reserve, or nothing.

    Attributes
    ----------
    name : str
    device : int
        Ordinal.
    window : AccessWindow or None
        None: no window is set.
    reserve : int or None
        Bytes of L2 for persisting lines; None: the device's limit is not touched.
    nodes : tuple of str or None
        Set the window on those kernel nodes of the finished graph whose name holds one of these texts; None: on the stream, so on all.
    options : mapping
        What the caller's code makes of the plan: shares for cache hints, a layout.
    suspend : tuple of str
        Phases in which the reserve is given back, see `Reservation.suspended`.
    guarded : str
        Why the guard kept the plan from doing anything; empty if it did not.
    """

    name: str = "stock"
    device: int = 0
    window: AccessWindow | None = None
    reserve: int | None = None
    nodes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    suspend: tuple[str, ...] = ()
    guarded: str = ""

    @property
    def does_nothing(self) -> bool:
        """Whether it leaves device and graphs as they are."""
        return self.window is None and self.reserve is None


STOCK = Plan()

_message_lock = threading.Lock()
_messages = 0


def _say_once(text: str) -> None:
    """One line on standard error, for the first plan of the process that the guard stops."""
    global _messages
    with _message_lock:
        _messages += 1
        if _messages > 1:
            return
    print(text, file=sys.stderr, flush=True)


def plan(
    region: Any,
    *,
    device: int = 0,
    wanted: int | None = None,
    ratio: float | None = None,
    hit: str = "persisting",
    miss: str = "normal",
    nodes: tuple[str, ...] | None = None,
    guard: bool = True,
    name: str = "window",
    options: Mapping[str, Any] | None = None,
    suspend: tuple[str, ...] = (),
    properties: DeviceProperties | None = None,
) -> Plan:
    """Plan a window over a region from what the device can do.

    Parameters
    ----------
    region : Region or array
        What to keep in the L2.
    device : int
        Ordinal.
    wanted : int, optional
        Bytes to reserve; as much as there is by default.
    ratio : float, optional
        Share of the lines that persist; by default as many as the reserve holds, because at 1 the lines would evict each other.
    hit, miss, nodes, name, options, suspend
        See `AccessWindow` and `Plan`.
    guard : bool
        Do nothing where the mechanism cannot work: a region larger than the largest window, which the driver would cut short without a word,
        or a device that has no memory to set aside (MIG). The first such plan of a process says so in one line on standard error. False
        plans it all the same.
    properties : DeviceProperties, optional
        Of the device, if not read from it.

    Returns
    -------
    Plan
        The reserve is the least of region, maximum and `wanted`; the ratio ``reserve / size`` where the region is larger.

    Raises
    ------
    ArgumentError
        The region is empty, or `wanted` is below 1.

    Examples
    --------
    >>> h200 = DeviceProperties(0, "H200", (9, 0), 132, 150 << 30, 62_914_560, 39_321_600, 134_217_728)
    >>> made = plan(Region(1 << 20, 128_778_240), properties=h200)
    >>> made.window.size, made.reserve, round(made.window.ratio, 4)
    (128778240, 39321600, 0.3053)
    """
    if not isinstance(region, Region):
        region = Region.of(region)
    if region.size < 1:
        raise ArgumentError("region: expected at least 1 byte, got none")
    if wanted is not None and wanted < 1:
        raise ArgumentError(f"wanted: expected at least 1 byte, got {wanted}")
    known = devices.properties(device) if properties is None else properties
    common: dict[str, Any] = {"name": name, "device": device, "nodes": nodes, "options": dict(options or {}), "suspend": suspend}
    if guard and (reason := _refusal(region.size, known)):
        _refuse(reason)
        return Plan(**common, guarded=reason)
    reserve = min(region.size, known.persisting_l2_max, region.size if wanted is None else wanted)
    if ratio is None:
        ratio = reserve / region.size if region.size > reserve else 1.0
    return Plan(**common, window=AccessWindow(region.base, region.size, ratio, hit, miss), reserve=reserve or None)


def admit(window: AccessWindow | None, device: int, *, properties: DeviceProperties | None = None) -> AccessWindow | None:
    """The guard of `plan` for a window that did not come from one: the window, or None where the device cannot have it.

    Examples
    --------
    >>> narrow = DeviceProperties(0, "narrow", (9, 0), 132, 150 << 30, 62_914_560, 39_321_600, 1 << 20)
    >>> admit(AccessWindow(0, 1 << 20), 0, properties=narrow).size
    1048576
    """
    if window is None:
        return None
    reason = _refusal(window.size, devices.properties(device) if properties is None else properties)
    if reason:
        _refuse(reason)
        return None
    return window


def _refuse(reason: str) -> None:
    _say_once(f"gpukit: no L2 window: {reason}; nothing is installed")


def _refusal(size: int, known: DeviceProperties) -> str:
    """Why a window of so many bytes cannot work on a device; empty if it can."""
    if known.persisting_l2_max == 0 or known.access_window_max == 0:
        return f"{size} bytes wanted, but the device sets aside {known.persisting_l2_max} bytes at most, with windows of {known.access_window_max}"
    if size > known.access_window_max:
        return f"{size} bytes are more than the device's largest window of {known.access_window_max}"
    return ""


@dataclass(frozen=True)
class Recipe:
    """What to try, without addresses.

    Attributes
    ----------
    name : str
    region : str or None
        Name of the region that the window lies over; None for no window.
    begin, size : int, int or None
        Part of the region, in bytes; `size` None is to its end.
    reserve : int or None
        Bytes to set aside: None as much as there is, or nothing where there is no window.
    ratio, hit, miss, nodes, options, suspend
        See `Plan`.

    Examples
    --------
    >>> recipe = Recipe("first half", "states", size=1000, reserve=500)
    >>> h200 = DeviceProperties(0, "H200", (9, 0), 132, 150 << 30, 62_914_560, 39_321_600, 134_217_728)
    >>> recipe.plan({"states": Region(4096, 2000)}, properties=h200).window
    AccessWindow(base=4096, size=1000, ratio=0.5, hit='persisting', miss='normal')
    """

    name: str
    region: str | None = None
    begin: int = 0
    size: int | None = None
    reserve: int | None = None
    ratio: float | None = None
    hit: str = "persisting"
    miss: str = "normal"
    nodes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    suspend: tuple[str, ...] = ()

    def plan(self, regions: Mapping[str, Region], *, device: int = 0, guard: bool = True, properties: DeviceProperties | None = None) -> Plan:
        """The plan of this recipe for regions at their addresses.

        Raises
        ------
        ArgumentError
            There is no such region, or its part lies outside it.
        """
        if self.region is None:
            return Plan(self.name, device, None, self.reserve, None, dict(self.options), self.suspend)
        if self.region not in regions:
            raise ArgumentError(f"region: expected one of {', '.join(regions)}, got {self.region!r}")
        whole = regions[self.region]
        size = whole.size - self.begin if self.size is None else self.size
        if self.begin < 0 or size < 1 or self.begin + size > whole.size:
            raise ArgumentError(f"begin, size: expected a part of the {whole.size} bytes of {self.region}, got {size} from {self.begin}")
        return plan(
            Region(whole.base + self.begin, size),
            device=device,
            wanted=self.reserve,
            ratio=self.ratio,
            hit=self.hit,
            miss=self.miss,
            nodes=self.nodes,
            guard=guard,
            name=self.name,
            options=self.options,
            suspend=self.suspend,
            properties=properties,
        )

    def to_dict(self) -> dict[str, Any]:
        """In plain types."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict`, or JSON made from it, describes.

        Examples
        --------
        >>> recipe = Recipe("two kernels", "states", nodes=("gated_delta",))
        >>> Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        True
        """
        names = {own.name for own in fields(cls)}
        if unknown := set(content) - names:
            raise ArgumentError(f"recipe: expected fields of {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
        if "name" not in content:
            raise ArgumentError("recipe: expected a name, got none")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        return cls(**values)


def load_plan(path: str | Path) -> Recipe:
    """The recipe in a JSON file: one of `Recipe.to_dict`, or the winner of a result that `tune` wrote.

    Raises
    ------
    ArgumentError
        The file cannot be read, or holds no recipe.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.json"
    >>> _ = path.write_text(json.dumps(Recipe("half", "states", reserve=1 << 20).to_dict()))
    >>> load_plan(path).reserve
    1048576
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"path: expected a readable JSON file, got {path}: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("winner"), dict):
        content = content["winner"]
    if not isinstance(content, dict):
        raise ArgumentError(f"path: expected a recipe or a result of tune, got {type(content).__name__} in {path}")
    return Recipe.from_dict(content)
