"""A decode round over split memory, as a short list of named stages over a `Batch` (what was decided) and a `Lane` (one backend's arrays).

A stage calls public ops and enqueues; it decides nothing and reads nothing back, because the host knows every length. `unified` has
the same round as one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpukit.decode.lane import Lane, Prompts
from gpukit.decode.scheduler import Batch, Running
from gpukit.kernels import free_list, metadata, page_table, sliding_window

__all__ = ["STAGES", "Stage"]

Stage = Callable[[Batch, Lane], None]


def upload(batch: Batch, lane: Lane) -> None:
    """Send the round's numbers to the device, in one copy."""
    lane.control = lane.meter("upload", lane.backend.to_device, batch.control(lane.options.batch))


def preempt(batch: Batch, lane: Lane) -> None:
    """Give back the pages of preempted requests."""
    for running in batch.preempted:
        _free(running, lane)


def place_prompts(batch: Batch, lane: Lane) -> None:
    """Place the prompts of admitted requests: token ids into their rows, pages into both pools, write locations.

    In the SWA pool only the pages inside the window are bound; tokens before it are written to the sink.
    """
    lane.prompts = None
    if not batch.admitted:
        return
    meter, backend, page_size = lane.meter, lane.backend, lane.options.page_size
    lengths = [running.prompt for running in batch.admitted]
    page_counts = [-(-length // page_size) for length in lengths]
    # Nothing is cached: no prefix, no last location.
    prefix_lens, seq_lens, last_loc = meter("upload", backend.to_device, _prompt_lengths(lengths))
    virtual = lane.supplies["virtual"].take(sum(page_counts))
    full = lane.supplies["full"].take(sum(page_counts))
    tokens = meter(
        "free_list.gather_extend",
        free_list.gather_extend,
        *(prefix_lens, seq_lens, last_loc, virtual, page_size),
        num_tokens=sum(lengths),
        num_pages=sum(page_counts),
        out=backend.empty(sum(lengths), np.int64),
        signal=lane.signal,
    )
    meter("page_table.bind", page_table.bind, virtual, full, lane.full.v2p, lane.full.p2v, signal=lane.signal)
    in_window = _in_window(batch.admitted, page_counts, virtual, lane)
    swa = lane.supplies["swa"].take(len(in_window))
    meter("page_table.bind", page_table.bind, in_window, swa, lane.swa.v2p, lane.swa.p2v, signal=lane.signal)
    _write_rows(batch.admitted, tokens, lane)
    lane.prompts = Prompts(tokens, backend.empty(len(tokens), np.int64), backend.empty(len(tokens), np.int64))
    meter("page_table.translate", page_table.translate, tokens, lane.full.v2p, page_size, out=lane.prompts.full, signal=lane.signal)
    # No signal: tokens before the window have no SWA page on purpose.
    meter("page_table.translate", page_table.translate, tokens, lane.swa.v2p, page_size, out=lane.prompts.swa)


def grow(batch: Batch, lane: Lane) -> None:
    """One token per request; a token that opens a page takes one from each pool."""
    meter, count, new_pages = lane.meter, len(batch.running), batch.new_pages
    rows, lengths = lane.control[0, :count], lane.control[1, :count]
    last_loc = meter("rows[…] read", lane.rows.__getitem__, (rows, lengths - 2))
    virtual = lane.supplies["virtual"].take(new_pages)
    locations = lane.locations[:count]
    meter(
        "free_list.gather_decode",
        free_list.gather_decode,
        *(lengths, last_loc, virtual, lane.options.page_size),
        out=locations,
        signal=lane.signal,
    )
    if new_pages:
        for kind, tables in (("full", lane.full), ("swa", lane.swa)):
            pages = lane.supplies[kind].take(new_pages)
            meter("page_table.bind", page_table.bind, virtual, pages, tables.v2p, tables.p2v, signal=lane.signal)
    meter("rows[…] write", lane.rows.__setitem__, (rows, lengths - 1), locations)


def retire(batch: Batch, lane: Lane) -> None:
    """Tombstone the pages that left the window, in the SWA pool only."""
    if not batch.retired_pages:
        return
    rows, _, starts, stops = (line[: len(batch.running)] for line in lane.control)
    lane.meter(
        "sliding_window.retire",
        sliding_window.retire,
        *(lane.rows, starts, stops, lane.options.page_size, lane.swa.v2p, lane.swa.p2v, lane.supplies["swa"].ring),
        request_indices=rows,
        signal=lane.signal,
    )


def translate(batch: Batch, lane: Lane) -> None:
    """Where the round's tokens are written in both pools; idle lanes write to the sink."""
    locations = lane.locations[: len(batch.running)]
    for tables, out in ((lane.full, lane.full_locations), (lane.swa, lane.swa_locations)):
        lane.meter(
            "page_table.translate",
            page_table.translate,
            *(locations, tables.v2p, lane.options.page_size),
            out=out,
            out_width=lane.options.batch,
            signal=lane.signal,
        )


def build_metadata(batch: Batch, lane: Lane) -> None:
    """What attention reads: lengths, cumulative lengths and both pools' page tables, in one launch."""
    lane.meter(
        "metadata.decode_metadata",
        metadata.decode_metadata,
        *(lane.rows, lane.control[1], lane.spaces, lane.options.page_size),
        lengths_out=lane.lengths,
        cu_lengths_out=lane.cu_lengths,
        full_out=lane.full_pages,
        swa_out=lane.swa_pages,
        request_indices=lane.control[0],
        valid=len(batch.running),
        signal=lane.signal,
    )


def finish(batch: Batch, lane: Lane) -> None:
    """Give back the pages of requests that have all their tokens."""
    for running in batch.finished:
        _free(running, lane)


def stock(batch: Batch, lane: Lane) -> None:
    """Safe point: pages freed on the device return to free lists that run low."""
    for supply in lane.supplies.values():
        supply.stock(lane.options.batch)


STAGES: list[Stage] = [upload, preempt, place_prompts, grow, retire, translate, build_metadata, finish, stock]


def _prompt_lengths(lengths: list[int]) -> np.ndarray:
    """Prefix lengths, sequence lengths and last locations of prompts that begin with nothing cached."""
    return np.array([[0] * len(lengths), lengths, [-1] * len(lengths)], np.int64)


def _in_window(admitted: list[Running], page_counts: list[int], virtual: Any, lane: Lane) -> Any:
    """The virtual pages of each prompt that lie inside the window."""
    parts, begin = [], 0
    for running, count in zip(admitted, page_counts, strict=True):
        parts.append(virtual[begin + running.retired_from // lane.options.page_size : begin + count])
        begin += count
    return lane.backend.concatenate(parts)


def _write_rows(admitted: list[Running], tokens: Any, lane: Lane) -> None:
    begin = 0
    for running in admitted:
        prompt = tokens[begin : begin + running.prompt]
        lane.meter("rows[…] write", lane.rows.__setitem__, (running.row, slice(running.prompt)), prompt)
        begin += running.prompt


def _free(running: Running, lane: Lane) -> None:
    lane.meter(
        "sliding_window.free_segment",
        sliding_window.free_segment,
        *(lane.rows[running.row, : running.length], 0, lane.options.page_size),
        *(lane.full.v2p, lane.full.p2v, lane.swa.v2p, lane.swa.p2v),
        *(lane.supplies[kind].ring for kind in ("virtual", "full", "swa")),
        signal=lane.signal,
    )
