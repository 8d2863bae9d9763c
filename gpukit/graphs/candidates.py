"""Plans worth trying, as data: the published recipe, reserves times window shapes, windows on chosen nodes, cache hints. Measuring is `tune`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukit import checks
from gpukit.devices import DeviceProperties
from gpukit.errors import ArgumentError
from gpukit.graphs.result import PUBLISHED_NAME
from gpukit.graphs.window import Recipe, Region, require_regions

__all__ = ["candidates"]


def candidates(
    regions: Mapping[str, Region],
    properties: DeviceProperties,
    *,
    pool: str | None = None,
    reserves: Sequence[int] | None = None,
    nodes: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    hints: Sequence[Mapping[str, Any]] = (),
) -> list[Recipe]:
    """The usual candidates, as data: the published recipe, nothing pinned, reserves times window shapes, windows on chosen nodes, cache hints.

    Parameters
    ----------
    regions : mapping of str to Region
        What to put windows over.
    properties : DeviceProperties
        Of the device.
    pool : str, optional
        The region of the published recipe: the maximum reserve, all of the pool. The first by default.
    reserves : sequence of int, optional
        Bytes; a fifth, a third, two thirds and all of the maximum by default, because gains have been seen to turn into losses in between.
    nodes : sequence of str
        Texts from the names of the kernels that use the regions; windows on those alone are tried beside windows on all.
    options : mapping of str to mapping, optional
        What `build_graph` needs to be told where a region is used, by region: a layout.
    hints : sequence of mapping, optional
        Options of candidates that have no window at all: shares of lines that kernels ask the cache to keep.

    Returns
    -------
    list of Recipe
        For each region and reserve: the whole region at the ratio that the reserve holds, and its first bytes, as many as the reserve, at ratio 1.

    Raises
    ------
    ArgumentError
        No regions, a `pool` or `options` of a region that is not there, or a type that an argument cannot have; a lone text is no sequence.

    Examples
    --------
    >>> h200 = DeviceProperties(0, "H200", (9, 0), 132, 150 << 30, 62_914_560, 39_321_600, 134_217_728)
    >>> [recipe.name for recipe in candidates({"states": Region(4096, 64 << 20)}, h200, reserves=[8 << 20])]
    ['published', 'maximum reserve, nothing pinned', 'states, 8.0 MiB', 'states, first 8.0 MiB']
    """
    regions = require_regions(regions)
    options = checks.mapping({} if options is None else options, "options")
    for argument, names in (("pool", () if pool is None else (pool,)), ("options", options)):
        for name in names:
            if name not in regions:
                raise ArgumentError(f"{argument}: expected one of {', '.join(regions)}, got {name!r}")
    for own in options.values():
        checks.mapping(own, "options")
    nodes = checks.texts(nodes, "nodes")
    hints = [checks.mapping(own, "hints") for own in checks.items(hints, "hints")]
    if reserves is not None:
        reserves = [checks.whole(size, "reserves") for size in checks.items(reserves, "reserves")]
    most = properties.persisting_l2_max
    told = {name: dict(options.get(name, {})) for name in regions}
    sizes = list(reserves) if reserves is not None else [most // 5 >> 20 << 20, most // 3 >> 20 << 20, 2 * most // 3 >> 20 << 20, most]
    published = next(iter(regions)) if pool is None else pool
    found = [Recipe(PUBLISHED_NAME, published, options=told.get(published, {}))]
    if most:
        found.append(Recipe("maximum reserve, nothing pinned", reserve=most))
    shown: dict[str, dict[str, Any]] = {}
    for name in regions:
        if told[name] and str(told[name]) not in shown:
            shown[str(told[name])] = told[name]
    found += [Recipe(_words(own), options=own) for own in shown.values()]
    for name, region in regions.items():
        # More than the region takes is the same plan again.
        for size in sorted({min(size, region.size) for size in sizes if size > 0}):
            text, part = (f"{name}, {first}{size / (1 << 20):.1f} MiB" for first in ("", "first "))
            found.append(Recipe(text, name, reserve=size, options=told[name]))
            if size < region.size:
                found.append(Recipe(part, name, size=size, reserve=size, options=told[name]))
            if nodes:
                found.append(Recipe(f"{text}, on {', '.join(nodes)}", name, reserve=size, nodes=nodes, options=told[name]))
    found += [Recipe(_words(own), options=dict(own)) for own in hints]
    return found


def _words(options: Mapping[str, Any]) -> str:
    return "only " + ", ".join(f"{key} {value}" for key, value in options.items())
