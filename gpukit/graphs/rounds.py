"""Decode rounds to audit and to tune, by name. Each allocates on its device when built; measuring is `tune`'s.

A new round is a function that returns a `Round`, registered under a name::

    @register("name", "one line for the list")
    def build(options: RoundOptions) -> Round: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpukit import checks, devices
from gpukit.arrays import ITEMSIZE, contiguous_strides
from gpukit.errors import ArgumentError, DeviceError
from gpukit.graphs.candidates import candidates
from gpukit.graphs.capture import Graph, capture
from gpukit.graphs.tune import Built
from gpukit.graphs.window import Plan, Recipe, Region
from gpukit.registry import Registry

__all__ = ["ROUNDS", "Round", "RoundOptions", "build", "register", "summaries"]

# A layer of one slot: convolution history (3 columns of 8,192 bfloat16) and state (32 heads of 128 x 128 float32).
_CONV_BYTES, _STATE_BYTES = 49_152, 2_097_152
_PAGE = _CONV_BYTES + _STATE_BYTES
_HEADS, _KEY_HEADS, _DIM, _CHANNELS = 32, 16, 128, 8_192
_MIB = 1 << 20


@dataclass(frozen=True)
class RoundOptions:
    """What a round is made of.

    Attributes
    ----------
    weights : int
        Bytes of weights that every round streams past the state.
    layers, slots : int
        Of the pool; one slot is live.
    rounds : int
        Decode rounds in a graph.
    prefill : int
        Bytes that a prefill streams, once in a cycle of `decodes` graphs; 0 for no prefill.
    decodes : int
    device : int
        Ordinal.
    """

    weights: int = 64 * _MIB
    layers: int = 30
    slots: int = 2
    rounds: int = 8
    prefill: int = 0
    decodes: int = 4
    device: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "slots", "rounds", "decodes", "weights", "prefill", "device"):
            checks.whole(getattr(self, name), name, 0 if name in ("weights", "prefill", "device") else 1)

    @property
    def phases(self) -> dict[str, int]:
        """The mix."""
        return {"prefill": 1, "decode": self.decodes} if self.prefill else {"decode": 1}


@dataclass(frozen=True)
class Round:
    """What `tune` needs of a round, see there; `keep` is its memory."""

    build_graph: Callable[[Plan], Built]
    regions: Mapping[str, Region]
    phases: Mapping[str, int]
    recipes: list[Recipe]
    geometry: Mapping[str, Any]
    keep: Any = None


ROUNDS: Registry[[RoundOptions], Round] = Registry("round", elsewhere=("gpukit.decode.residency",))
register, summaries, build = ROUNDS.register, ROUNDS.summaries, ROUNDS.build


def _cupy() -> ModuleType:
    devices.driver()
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"a round needs CuPy ({error}); install gpukit with the extra cu13 or cu12") from None
    return cupy  # type: ignore[no-any-return]


class _Pools:
    """A pool in both layouts: pages of a layer and slot, by layer or by slot first. Slot 0 is live."""

    def __init__(self, options: RoundOptions):
        cupy = _cupy()
        self.options = options
        shape = (options.layers, options.slots)
        with cupy.cuda.Device(options.device):
            self.pages = {
                "layer": cupy.zeros((*shape, _PAGE), cupy.uint8),
                "slot": cupy.zeros((*shape[::-1], _PAGE), cupy.uint8).swapaxes(0, 1),
            }
            self.weights = cupy.zeros(max(options.weights, options.prefill, 16) // 16 * 4, cupy.int32)
            self.weights[:] = cupy.arange(len(self.weights), dtype=cupy.int32)
            self.sums = cupy.zeros(4 * devices.properties(options.device).multiprocessors, cupy.int32)
            self.slots = cupy.zeros(1, cupy.int64)
            cupy.cuda.Device().synchronize()
        self.stream = devices.create_stream(options.device)

    def regions(self) -> dict[str, Region]:
        """The whole pool, layer-major, and the live pages of the slot-major one, which lie together."""
        layers, slots = self.options.layers, self.options.slots
        live = tuple((layer * slots * _PAGE, _PAGE) for layer in range(layers)) if slots > 1 else ()
        by_slot = self.pages["slot"]
        return {
            "pool": Region(int(self.pages["layer"].data.ptr), layers * slots * _PAGE, live),
            "live": Region(int(by_slot.data.ptr), layers * _PAGE),
        }

    def recipes(self, nodes: tuple[str, ...]) -> list[Recipe]:
        """The usual candidates for both regions, and shares for hints."""
        known = devices.properties(self.options.device)
        most = known.persisting_l2_max
        live = self.options.layers * _PAGE
        shares = sorted({round(min(1.0, mib * _MIB / live), 3) for mib in (16, 24, 32, 40)})
        hints: list[dict[str, Any]] = [{"keep": share, "weights": 0.0} for share in (0.0, *shares)]
        middle = shares[len(shares) // 2]
        hints += [{"keep": middle, "weights": 0.0, "layout": "slot"}, {"keep": middle}]
        # The first lines that a round reaches, not lines all over the state.
        hints += [{"keep": share, "scattered": False, "weights": 0.0} for share in shares]
        reserves = [size for size in (8 * _MIB, 11_796_480, 24 * _MIB, most) if size <= most] if most else []
        options = {"live": {"layout": "slot"}}
        regions = self.regions()
        found = candidates(
            {name: regions[name] for name in ("live", "pool")}, known, pool="pool", reserves=reserves, nodes=nodes, options=options, hints=hints
        )
        if self.options.prefill and reserves:
            size = reserves[-2] if len(reserves) > 1 else reserves[0]
            found.append(Recipe("live, given back for prefill", "live", reserve=size, options=options["live"], suspend=("prefill",)))
        return found

    def geometry(self, name: str) -> dict[str, Any]:
        """What results depend on."""
        own = self.options
        return {"round": name, "weights": own.weights, "layers": own.layers, "slots": own.slots, "rounds": own.rounds, "prefill": own.prefill}

    def stream_weights(self, size: int, plan: Plan, part: int = 0, parts: int = 1) -> None:
        """One of `parts` pieces of the first `size` bytes of the weights, past the L2 or through it."""
        from gpukit.kernels import residency

        words = size // 16 * 4
        begin, end = (words * edge // parts // 4 * 4 for edge in (part, part + 1))
        if end > begin:
            residency.stream_weights(self.weights[begin:end], self.sums, keep=plan.options.get("weights"), stream=self.stream)

    def prefill(self, plan: Plan) -> dict[str, Graph]:
        """The phase that streams, if there is one."""
        if not self.options.prefill:
            return {}
        with capture(self.stream, device=self.options.device, plan=plan if plan.nodes is None else None) as graph:
            self.stream_weights(self.options.prefill, plan)
        return {"prefill": graph}

    def part(self, layout: str, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """What lies at an offset of every page, as an array [layers, slots, *shape]."""
        cupy = _cupy()
        pages, itemsize = self.pages[layout], ITEMSIZE[dtype]
        strides = (*pages.strides[:2], *(itemsize * stride for stride in contiguous_strides(shape)))
        return cupy.ndarray((*pages.shape[:2], *shape), dtype, memptr=pages.data + offset, strides=strides)

    def words(self, layout: str) -> Any:
        """Whole pages as int32."""
        return self.part(layout, 0, "int32", (_PAGE // 4,))

    def live_pages(self, layout: str) -> Any:
        """A copy of the live pages by layer, the same in both layouts."""
        return self.words(layout)[:, 0].copy(order="C")


def _layout(plan: Plan) -> str:
    layout = plan.options.get("layout", "layer")
    if layout not in ("layer", "slot"):
        raise ArgumentError(f"layout: expected 'layer' or 'slot', got {layout!r}")
    return str(layout)


@register("synthetic", "a stream of weights and an in-place pass over the live state, one kernel each")
def _synthetic(options: RoundOptions) -> Round:
    from gpukit.kernels import residency
    from gpukit.launch import warmup

    cupy = _cupy()
    warmup(options.device, ["residency", "calibration"])
    pools = _Pools(options)

    def build_graph(plan: Plan) -> Built:
        layout = _layout(plan)
        states = pools.words(layout)
        with capture(pools.stream, device=options.device, plan=plan) as decode:
            for _ in range(options.rounds):
                if options.weights:
                    pools.stream_weights(options.weights, plan)
                keep, scattered = plan.options.get("keep"), plan.options.get("scattered", True)
                residency.advance_states(states, pools.slots, keep=keep, scattered=scattered, stream=pools.stream)
        phases = {**pools.prefill(plan), "decode": decode}

        def outputs(seed: int) -> Iterable[Any]:
            with cupy.cuda.Device(options.device), cupy.cuda.ExternalStream(pools.stream, options.device):
                words = cupy.arange(options.layers * (_PAGE // 4), dtype=cupy.int32).reshape(options.layers, -1)
                states[:, 0] = words * 2_654_435 + seed
                for graph in phases.values():
                    graph.launch()
                return [pools.live_pages(layout), pools.sums.copy()]

        return Built(phases, pools.stream, outputs, pools)

    return Round(build_graph, pools.regions(), options.phases, pools.recipes(("advance_states",)), pools.geometry("synthetic"), pools)


@register("recurrent", "convolution and gated delta rule of every layer, each beside its share of a stream of weights")
def _recurrent(options: RoundOptions) -> Round:
    from gpukit.kernels import conv, gated_delta
    from gpukit.kernels.state_pool import StatePool
    from gpukit.launch import warmup

    cupy = _cupy()
    warmup(options.device, ["conv", "gated_delta", "residency", "calibration"])
    pools = _Pools(options)
    layers = options.layers
    pool_of = {}
    with cupy.cuda.Device(options.device):
        for layout in pools.pages:
            histories = pools.part(layout, 0, "uint16", (3, _CHANNELS))
            states = pools.part(layout, _CONV_BYTES, "float32", (_HEADS, _DIM, _DIM))
            pool_of[layout] = StatePool(states, histories)
        x = cupy.zeros((1, 1, _CHANNELS), cupy.uint16)
        weight = cupy.full((_CHANNELS, 4), 0x3E80, cupy.uint16)
        mixed = cupy.zeros((1, 1, _CHANNELS), cupy.uint16)
        gate = cupy.full((1, 1, _HEADS), -0.05, cupy.float32)
        beta = cupy.full((1, 1, _HEADS), 0.5, cupy.float32)
        out = cupy.zeros((1, 1, _HEADS, _DIM), cupy.uint16)
        cupy.cuda.Device().synchronize()
    width = _KEY_HEADS * _DIM
    q, k = (mixed[:, :, part * width : (part + 1) * width].reshape(1, 1, _KEY_HEADS, _DIM) for part in (0, 1))
    v = mixed[:, :, 2 * width :].reshape(1, 1, _HEADS, _DIM)

    def step(plan: Plan, layer: int) -> None:
        pool = pool_of[_layout(plan)]
        conv.conv1d_silu(x, weight, pool.conv[layer], pools.slots, out=mixed, stream=pools.stream)
        gated_delta.direct(q, k, v, gate, beta, pool, pools.slots, layer=layer, out=out, keep=plan.options.get("keep"), stream=pools.stream)
        if options.weights:
            pools.stream_weights(options.weights, plan, layer, layers)

    def build_graph(plan: Plan) -> Built:
        with capture(pools.stream, device=options.device, plan=plan) as decode:
            for _ in range(options.rounds):
                for layer in range(layers):
                    step(plan, layer)
        phases = {**pools.prefill(plan), "decode": decode}

        def outputs(seed: int) -> Iterable[Any]:
            with cupy.cuda.Device(options.device), cupy.cuda.ExternalStream(pools.stream, options.device):
                pools.pages[_layout(plan)][...] = 0
                # bfloat16 numbers from 1 to 2 in an order of the seed's.
                x[0, 0] = ((cupy.arange(_CHANNELS) * 37 * seed) % 128 + 0x3F80).astype(cupy.uint16)
                for graph in phases.values():
                    graph.launch()
                return [pools.live_pages(_layout(plan)), out.copy(), pools.sums.copy()]

        return Built(phases, pools.stream, outputs, (pools, x, weight, mixed, gate, beta, out))

    # Which lines are kept is the hardware's choice here.
    recipes = [recipe for recipe in pools.recipes(("conv1d_silu", "direct")) if "scattered" not in recipe.options]
    recipes.append(Recipe("only weights 0.0", options={"weights": 0.0}))
    return Round(build_graph, pools.regions(), options.phases, recipes, pools.geometry("recurrent"), pools)
