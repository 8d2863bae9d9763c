"""The L2 plan of a model's decode rounds: what ``--residency`` means, and the round that ``gpukit tune decode`` measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from gpukit import devices
from gpukit.decode.backend import CupyBackend
from gpukit.decode.geometry import GEOMETRIES
from gpukit.decode.recurrent import SUBJECTS, Decoder, own_stream
from gpukit.decode.weights import Weights
from gpukit.errors import ArgumentError
from gpukit.graphs.candidates import candidates
from gpukit.graphs.result import TuneResult
from gpukit.graphs.rounds import Round, RoundOptions, register
from gpukit.graphs.tune import Built, resolve, tune
from gpukit.graphs.window import Plan, Recipe, Region

__all__ = ["STATE_KERNELS", "plan_for", "regions_of"]

# Parts of the names of the kernels that read states: windows on these alone are tried beside windows on all.
STATE_KERNELS = ("record", "fold", "direct")
# The sequences, drafts and weights of the round by name.
_MODEL, _DRAFTS = "qwen3.6-35b-a3b", 3


def regions_of(decoder: Decoder) -> dict[str, Region]:
    """The states of all slots; its live parts are those of the sequences."""
    pool = decoder.pool
    stride, size = pool.itemsize * pool.slot_stride, pool.itemsize * pool.layers * pool.layer_stride
    live = tuple((stride * slot, size) for slot in sorted(decoder.places.tolist()))
    return {"states": Region.of(pool.rec, live)}


def plan_for(residency: str, decoder: Decoder, stream: int) -> Plan:
    """The plan that ``off``, ``auto`` or the name of a file means for a decoder's rounds.

    ``auto`` measures the usual candidates on this very round, in ladders, and is stock unless one beats it; see `gpukit.graphs.tune`.
    """
    regions = regions_of(decoder)
    return resolve(residency, regions, measure=lambda: _measure(decoder, stream, regions))


def _measure(decoder: Decoder, stream: int, regions: dict[str, Region]) -> TuneResult:
    def build_graph(plan: Plan) -> Built:
        return _built(decoder, stream, plan, {})

    return tune(build_graph, regions, {"decode": 1}, recipes=_recipes(regions), passes=5, geometry=_geometry(decoder))


def _recipes(regions: dict[str, Region]) -> list[Recipe]:
    return candidates(regions, devices.properties(0), nodes=STATE_KERNELS)


def _geometry(decoder: Decoder) -> dict[str, Any]:
    """What a result depends on."""
    return {"round": "decode", "model": decoder.geometry.name, "layers": decoder.geometry.layers, "batch": decoder.batch, "tokens": decoder.tokens}


def _built(decoder: Decoder, stream: int, plan: Plan, others: dict[str, Any]) -> Built:
    """One graph of a round under a plan, and what it puts out from a fresh start."""
    graph = decoder.capture(stream, 0, plan)

    def outputs(seed: int) -> Iterable[Any]:
        decoder.start(np.random.default_rng(seed).integers(0, decoder.geometry.vocabulary, decoder.batch))
        graph.launch()
        return [decoder.anchors.copy(), decoder.emitted.copy(), *(decoder.pool.rec[:, slot].copy() for slot in decoder.places.tolist())]

    return Built({**others, "decode": graph}, stream, outputs, decoder)


@register("decode", "a speculative round of the recurrent layers of a 35B hybrid model with its projections, one sequence")
def _decode(options: RoundOptions) -> Round:
    from gpukit.graphs.capture import capture
    from gpukit.kernels import residency
    from gpukit.launch import warmup

    if options.device:
        raise ArgumentError(f"device: expected 0 for this round, got {options.device}")
    warmup(subjects=(*SUBJECTS, "residency", "calibration"))
    backend = CupyBackend()
    geometry = replace(GEOMETRIES[_MODEL], layers=options.layers, experts=0)
    weights = Weights.random(geometry, backend)
    decoder = Decoder(geometry, weights, backend, 1, drafts=_DRAFTS, width=_DRAFTS + 1, exact=False)
    # The block ends with the process: the graphs of a `Round` need its stream.
    keep = own_stream(backend)
    stream = keep.__enter__()
    sums = backend.zeros(4 * devices.properties(0).multiprocessors, np.int32)
    words = weights.head.reshape(-1).view(np.int32)[: max(options.prefill, 16) // 16 * 4]

    def build_graph(plan: Plan) -> Built:
        phases = {}
        if options.prefill:
            with capture(stream, plan=plan if plan.nodes is None else None) as phases["prefill"]:
                residency.stream_weights(words, sums, keep=plan.options.get("weights"))
        return _built(decoder, stream, plan, phases)

    regions = regions_of(decoder)
    return Round(build_graph, regions, options.phases, _recipes(regions), _geometry(decoder) | {"prefill": options.prefill}, (keep, decoder, sums))
