"""Which bytes to keep in the L2, and whether the device can: regions, windows, plans with the guard, and recipes. It calls no driver.

A *recipe* says what to try without saying where: it is data, and survives its process. On regions of memory and a device's properties it becomes
a *plan*: a window with base, size and ratio, and a reserve. `install` puts plans on streams and graphs; `reservation` owns the reserve.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gpukit import arrays, checks, devices
from gpukit.arrays import ITEMSIZE
from gpukit.devices import DeviceProperties
from gpukit.errors import ArgumentError, ArgumentTypeError

__all__ = ["STOCK", "AccessWindow", "Plan", "Recipe", "Region", "load_plan", "plan"]

# What a line inside a window may be; a missed one must not be persisting.
HITS = ("persisting", "normal", "streaming")
MISSES = ("normal", "streaming")
# Addresses and sizes have 64 bits.
_MOST = 2**64 - 1


def _set(instance: Any, **values: Any) -> None:
    """Put checked values into the place of those that a frozen instance was made with."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _check_lines(hit: Any, miss: Any) -> None:
    if hit not in HITS or miss not in MISSES:
        raise ArgumentError(f"hit, miss: expected one of {', '.join(HITS)} and one of {', '.join(MISSES)}, got {hit} and {miss}")


def _check_nodes(nodes: Any) -> tuple[str, ...] | None:
    if nodes is None:
        return None
    found = checks.texts(nodes, "nodes")
    if not found:
        raise ArgumentError("nodes: expected at least one text, or None for all kernels, got none")
    return found


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
        A value or type that no window can have.

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
        base = checks.whole(self.base, "base", 0, _MOST)
        size = checks.whole(self.size, "size", 1, _MOST + 1 - base)
        _set(self, base=base, size=size, ratio=checks.number(self.ratio, "ratio", 0, 1))
        _check_lines(self.hit, self.miss)


@dataclass(frozen=True)
class Region:
    """A stretch of device memory, and which of its bytes are in use.

    Attributes
    ----------
    base, size : int
        Address and bytes.
    live : tuple of (offset, size)
        Parts that a round touches; all of it when empty. The others are dead: holding them gains nothing.

    Raises
    ------
    ArgumentError
        An address below 0, a size below 0, either no integer, or parts that overlap or lie outside.

    Examples
    --------
    >>> Region(4096, 1000, live=((0, 100), (500, 100))).live_bytes
    200
    """

    base: int
    size: int
    live: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        base = checks.whole(self.base, "base", 0, _MOST)
        _set(self, base=base, size=checks.whole(self.size, "size", 0, _MOST + 1 - base))
        parts = tuple(checks.items(part, "live") for part in checks.items(self.live, "live"))
        end = 0
        for part in parts:
            if len(part) != 2:
                raise ArgumentError(f"live: expected pairs of offset and size, got {part}")
            offset, size = (checks.integer(own, "live") for own in part)
            if offset < end or size < 1 or offset + size > self.size:
                raise ArgumentError(f"live: expected parts inside {self.size} bytes in ascending order, apart from each other, got {self.live}")
            end = offset + size
        _set(self, live=tuple((int(offset), int(size)) for offset, size in parts))

    @classmethod
    def of(cls, array: Any, live: tuple[tuple[int, int], ...] = ()) -> Region:
        """The memory from the first to the last byte of an array of any library; gaps between strides are part of it.

        The numbers of an array in host memory are those of host memory, where no window helps; `plan` takes no such array.

        Raises
        ------
        ArgumentTypeError
            The object is no array, or of a dtype that gpukit does not know.

        Examples
        --------
        >>> import numpy as np
        >>> Region.of(np.zeros((4, 8), np.int64)[:, ::2]).size
        248
        """
        return cls._over(array, "array", live)[0]

    @classmethod
    def _over(cls, array: Any, name: str, live: tuple[tuple[int, int], ...] = ()) -> tuple[Region, int]:
        """The memory of an array that errors call `name`, and its device."""
        pointer, dtype, shape, strides, device, _ = arrays.describe(array, name)
        if dtype not in ITEMSIZE:
            raise ArgumentTypeError(f"{name}: expected dtype {', '.join(ITEMSIZE)}, got {dtype}")
        strides = arrays.contiguous_strides(shape) if strides is None else strides
        begin, end = arrays.span((pointer, ITEMSIZE[dtype], tuple(shape), tuple(strides)))
        return cls(begin, end - begin, live), device

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

    Raises
    ------
    ArgumentError
        A value or type that no plan can have; a lone text is no tuple of texts.
    """

    name: str = "stock"
    device: int = 0
    window: AccessWindow | None = None
    reserve: int | None = None
    nodes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    suspend: tuple[str, ...] = ()
    guarded: str = ""

    def __post_init__(self) -> None:
        if self.window is not None and not isinstance(self.window, AccessWindow):
            raise ArgumentTypeError(f"window: expected an AccessWindow or None, got {type(self.window).__name__}")
        _set(
            self,
            name=checks.text(self.name, "name"),
            device=checks.whole(self.device, "device"),
            reserve=None if self.reserve is None else checks.whole(self.reserve, "reserve", 1),
            nodes=_check_nodes(self.nodes),
            options=checks.mapping(self.options, "options"),
            suspend=checks.texts(self.suspend, "suspend"),
        )

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
        What to keep in the L2; an array lies in the memory of `device`.
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
        The region is empty, the array lies in host memory or on another device, or another argument has a value or type that it cannot have.

    Examples
    --------
    >>> h200 = DeviceProperties(0, "H200", (9, 0), 132, 150 << 30, 62_914_560, 39_321_600, 134_217_728)
    >>> made = plan(Region(1 << 20, 128_778_240), properties=h200)
    >>> made.window.size, made.reserve, round(made.window.ratio, 4)
    (128778240, 39321600, 0.3053)
    """
    device = checks.whole(device, "device")
    if not isinstance(region, Region):
        region, where = Region._over(region, "region")
        if where != device:
            kind = ArgumentTypeError if where < 0 else ArgumentError
            raise kind(f"region: expected an array on device {device}, got one in {arrays.place(where)}")
    if region.size < 1:
        raise ArgumentError("region: expected at least 1 byte, got none")
    if wanted is not None:
        wanted = checks.whole(wanted, "wanted", 1)
    if ratio is not None:
        ratio = checks.number(ratio, "ratio", 0, 1)
    _check_lines(hit, miss)
    common: dict[str, Any] = {
        "name": checks.text(name, "name"),
        "device": device,
        "nodes": _check_nodes(nodes),
        "options": dict(checks.mapping({} if options is None else options, "options")),
        "suspend": checks.texts(suspend, "suspend"),
    }
    known = devices.properties(device) if properties is None else properties
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


def require_regions(regions: Any) -> dict[str, Region]:
    """At least one region, by name."""
    for name, region in checks.mapping(regions, "regions").items():
        if not isinstance(region, Region):
            raise ArgumentTypeError(f"regions: expected a Region for {name}, got {type(region).__name__}")
    if not regions:
        raise ArgumentError("regions: expected at least one, got none")
    return dict(regions)


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

    Raises
    ------
    ArgumentError
        A value or type that no recipe can have, as those of a file may be; a lone text is no tuple of texts.

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

    def __post_init__(self) -> None:
        _set(
            self,
            name=checks.text(self.name, "name"),
            region=None if self.region is None else checks.text(self.region, "region"),
            begin=checks.whole(self.begin, "begin"),
            size=None if self.size is None else checks.whole(self.size, "size", 1),
            reserve=None if self.reserve is None else checks.whole(self.reserve, "reserve", 1),
            ratio=None if self.ratio is None else checks.number(self.ratio, "ratio", 0, 1),
            nodes=_check_nodes(self.nodes),
            options=checks.mapping(self.options, "options"),
            suspend=checks.texts(self.suspend, "suspend"),
        )
        _check_lines(self.hit, self.miss)

    def plan(self, regions: Mapping[str, Region], *, device: int = 0, guard: bool = True, properties: DeviceProperties | None = None) -> Plan:
        """The plan of this recipe for regions at their addresses.

        The guard is in front of a reserve without a window too: nothing on a device that has no memory to set aside.

        Raises
        ------
        ArgumentError
            There is no such region, its part lies outside it, or the reserve of a recipe without a window exceeds the device's maximum.
        """
        if self.region is None:
            return self._windowless(checks.whole(device, "device"), guard, properties)
        if self.region not in require_regions(regions):
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

    def _windowless(self, device: int, guard: bool, properties: DeviceProperties | None) -> Plan:
        stock = Plan(self.name, device, options=dict(self.options), suspend=self.suspend)
        if self.reserve is not None and guard:
            most = (devices.properties(device) if properties is None else properties).persisting_l2_max
            if most == 0:
                reason = f"{self.reserve} bytes wanted, but the device sets aside none"
                _refuse(reason)
                return replace(stock, guarded=reason)
            if self.reserve > most:
                raise ArgumentError(f"reserve: expected at most the device's {most} bytes, got {self.reserve}")
        return replace(stock, reserve=self.reserve)

    def to_dict(self) -> dict[str, Any]:
        """In plain types."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict`, or JSON made from it, describes.

        Raises
        ------
        ArgumentError
            An unknown field, no name, or a value or type that the field cannot have.

        Examples
        --------
        >>> recipe = Recipe("two kernels", "states", nodes=("gated_delta",))
        >>> Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        True
        """
        names = {own.name for own in fields(cls)}
        if unknown := set(checks.mapping(content, "recipe")) - names:
            raise ArgumentError(f"recipe: expected fields of {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
        if "name" not in content:
            raise ArgumentError("recipe: expected a name, got none")
        return cls(**content)


def load_plan(path: str | Path) -> Recipe:
    """The recipe in a JSON file: one of `Recipe.to_dict`, or the winner of a result that `tune` wrote.

    Raises
    ------
    ArgumentError
        The file cannot be read, or holds no recipe: the message names the field.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.json"
    >>> _ = path.write_text(json.dumps(Recipe("half", "states", reserve=1 << 20).to_dict()))
    >>> load_plan(path).reserve
    1048576
    """
    file = checks.path(path, "path")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"path: expected a readable JSON file, got {path}: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("winner"), dict):
        content = content["winner"]
    if not isinstance(content, dict):
        raise ArgumentError(f"path: expected a recipe or a result of tune, got {type(content).__name__} in {path}")
    try:
        return Recipe.from_dict(content)
    except ArgumentError as error:
        raise type(error)(f"{error}, in {path}") from None
