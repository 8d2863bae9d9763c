"""Brute-force models of the paging ops, in plain Python, and the cases to try them on.

A sub-pool is a dictionary from virtual to physical page, a ring is a list, and every op is a loop over single ids that reads
like the specification. Nothing is shared with the code under test, not even the formulas where a walk will do instead.
Models count into a `Counter` by the kinds of `gpukit.errors.SIGNAL_KINDS`.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

PAGE_SIZES = (1, 3, 16, 64, 128)
POISON = -77


class Tables:
    """One sub-pool: `where[virtual] = physical` for the bound pages. `num_*` count the sink."""

    def __init__(self, num_virtual: int, num_physical: int, where: dict[int, int] | None = None):
        self.num_virtual, self.num_physical = num_virtual, num_physical
        self.where = dict(where or {})
        self.counts: Counter[str] = Counter()

    def arrays(self):
        """The two tables as the ops take them."""
        v2p = [0] + [self.where.get(v, -1) for v in range(1, self.num_virtual)] + [-1]
        p2v = [0] + [self.owners().get(p, -1) for p in range(1, self.num_physical)] + [-1]
        return np.array(v2p, dtype=np.int64), np.array(p2v, dtype=np.int64)

    def owners(self):
        return {p: v for v, p in self.where.items()}

    def is_virtual(self, v):
        return 1 <= v <= self.num_virtual - 1

    def is_physical(self, p):
        return 1 <= p <= self.num_physical - 1

    def bind(self, v, p):
        if not (self.is_virtual(v) and self.is_physical(p)):
            self.counts["out_of_range"] += 1
            return
        if v in self.where or p in self.owners():
            self.counts["rebound"] += 1
        self.where = {v2: p2 for v2, p2 in self.where.items() if v2 != v and p2 != p}
        self.where[v] = p

    def unbind(self, v):
        if not self.is_virtual(v):
            self.counts["out_of_range"] += 1
        elif v not in self.where:
            self.counts["unbound"] += 1
        else:
            return self.where.pop(v)
        return -1

    def remap(self, pairs):
        before, moved, filled = self.owners(), set(), set()
        for s, d in pairs:
            if not (self.is_physical(s) and self.is_physical(d)):
                self.counts["out_of_range"] += 1
            elif s not in before:
                self.counts["unbound"] += 1
            elif d in before:
                self.counts["occupied"] += 1
            elif s in moved:
                self.counts["unbound"] += 1
            elif d in filled:
                self.counts["occupied"] += 1
            else:
                moved.add(s)
                filled.add(d)
                self.where[before[s]] = d

    def page(self, v, counts):
        """What a read of virtual page v gives."""
        if v <= 0:
            return 0
        if not self.is_virtual(v):
            counts["out_of_range"] += 1
            return 0
        if v not in self.where:
            counts["unbound"] += 1
            return 0
        return self.where[v]

    def token(self, t, page_size, counts):
        """What a read of virtual token t gives. The sink page keeps its offsets."""
        if t < 0:
            return 0
        v, offset = divmod(t, page_size)
        p = self.page(v, counts)
        return p * page_size + offset if p > 0 or v == 0 else 0


class Identity:
    """The virtual space: the table that is not there."""

    def page(self, v, counts):
        return max(v, 0)

    def token(self, t, page_size, counts):
        return max(t, 0)


def device_pages(capacity: int, held=(), taken: int = 0) -> SimpleNamespace:
    """Arrays of a ring that holds `held` after `taken` pages have gone through it."""
    ring = np.full(capacity, POISON, dtype=np.int64)
    for i, page in enumerate(held):
        ring[(taken + i) % capacity] = page
    return SimpleNamespace(ring=ring, counters=np.array([taken, taken + len(held)], dtype=np.int64))


def held_pages(pages) -> list[int]:
    """What a ring holds, oldest first."""
    head, tail = pages.counters.tolist()
    return [int(pages.ring[i % len(pages.ring)]) for i in range(head, tail)]


def push(held: list[int], capacity: int, values, counts) -> None:
    """Append to the model of a ring."""
    for value in values:
        if len(held) < capacity:
            held.append(value)
        else:
            counts["exhausted"] += 1


def gather_extend(prefix_lens, seq_lens, last_loc, free_pages, page_size, num_tokens, num_pages, counts):
    """Walk every token of every request: the next page when one begins, else one further."""
    found, taken = [], 0
    for prefix, seq, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
        partial = prefix % page_size
        broken = prefix < 0 or seq < prefix or (last + 1) % page_size != partial or (partial != 0 and last < 0)
        counts["mismatch"] += broken
        location, granted = last, True
        for t in range(prefix, seq) if prefix >= 0 else ():
            location += 1
            if t % page_size == 0:
                granted = taken < num_pages and free_pages[taken] >= 1
                location = free_pages[taken] * page_size if granted else 0
                taken += 1
            if broken:
                found.append(0)
            elif not granted:
                found.append(0)
                counts["exhausted"] += len(found) <= num_tokens
            else:
                found.append(location)
    counts["mismatch"] += len(found) != num_tokens
    return (found + [0] * num_tokens)[:num_tokens]


def gather_decode(seq_lens, last_loc, free_pages, page_size, counts):
    """One token a request, in request order."""
    found, taken = [], 0
    for seq, last in zip(seq_lens, last_loc, strict=True):
        location = 0
        if seq > 0 and (seq - 1) % page_size == 0:
            if taken < len(free_pages) and free_pages[taken] >= 1:
                location = free_pages[taken] * page_size
            else:
                counts["exhausted"] += 1
            taken += 1
        elif seq > 0:
            if last >= 0 and (last + 1) % page_size == (seq - 1) % page_size:
                location = last + 1
            else:
                counts["mismatch"] += 1
        found.append(location)
    return found


def retire(rows, starts, stops, page_size, tables, request_indices):
    """Physical pages freed, in order."""
    freed = []
    for request, start, stop in zip(request_indices, starts, stops, strict=True):
        if not 0 <= request < len(rows):
            tables.counts["out_of_range"] += 1
        elif start < 0 or start % page_size:
            tables.counts["mismatch"] += 1
        else:
            for t in range(start, stop, page_size):
                if t + page_size <= stop and t < len(rows[request]):
                    freed.append(tables.unbind(rows[request][t] // page_size))
    return [p for p in freed if p > 0]


def free_segment(row_slice, page_size, owner, other):
    """Virtual pages, owner's pages and other's pages freed, in row order."""
    virtual_pages, owner_pages, other_pages = [], [], []
    for i, token in enumerate(row_slice):
        if i % page_size == 0:
            v = token // page_size
            p = owner.unbind(v)
            if p > 0:
                virtual_pages.append(v)
                owner_pages.append(p)
                if v in other.where:
                    other_pages.append(other.where.pop(v))
    return virtual_pages, owner_pages, other_pages


def frontier(key_length, window, page_size, old, retain):
    """Advance page by page while the window still fits behind the end of the insertion."""
    end = 0
    while end + page_size <= key_length:
        end += page_size
    safe = 0
    while safe + page_size + window <= end:
        safe += page_size
    safe = max(safe, old)
    return safe if retain is None else min(safe, retain)


def live_lengths(lens, delta, valid, request_indices, num_rows, counts):
    """Length of each lane; padding and lanes without a row have none."""
    lengths = []
    for b, (length, request) in enumerate(zip(lens, request_indices, strict=True)):
        if b >= valid:
            lengths.append(0)
        elif not 0 <= request < num_rows:
            counts["out_of_range"] += 1
            lengths.append(0)
        else:
            lengths.append(max(length + delta, 0))
    return lengths


def row_token(row, t, page_size, granularity):
    """Virtual id of token t of a row, None past its end. A page of -1 makes a negative token."""
    if granularity == "token":
        return row[t] if t < len(row) else None
    return row[t // page_size] * page_size + t % page_size if t // page_size < len(row) else None


def read_table(rows, lengths, tables, page_size, out, zero_tail, request_indices, granularity, counts):
    """Update `out`, a list of rows."""
    for b, (length, request) in enumerate(zip(lengths, request_indices, strict=True)):
        for c in range(len(out[b])):
            t = c * page_size
            token = row_token(rows[request], t, page_size, granularity) if t < length else None
            if token is not None:
                out[b][c] = tables.page(token // page_size, counts)
            elif zero_tail:
                out[b][c] = 0


def read_stream(rows, lengths, tables, page_size, indptr, out, request_indices, granularity, counts):
    """Update `out`, a list."""
    for b, (length, request) in enumerate(zip(lengths, request_indices, strict=True)):
        if indptr[b] < 0:
            counts["mismatch"] += length > 0
            continue
        for t in range(length):
            token = row_token(rows[request], t, page_size, granularity)
            at = indptr[b] + t
            if token is not None and at < indptr[b + 1] and at < len(out):
                out[at] = tables.token(token, page_size, counts)


# Cases


class Pick:
    """Random choices of one seed. Chosen this way, and not one by one by hypothesis, most cases have something to do."""

    def __init__(self, seed: int):
        self.seed = seed
        self.rng = np.random.default_rng(seed)

    def __repr__(self):
        return f"Pick({self.seed})"

    def __call__(self, options):
        """One of a sequence."""
        return options[int(self.rng.integers(len(options)))]

    def many(self, n, options):
        return [self(options) for _ in range(n)]

    def size(self, most):
        """A number from 0 to `most`, seldom 0."""
        return self([0, *range(1, most + 1), *range(1, most + 1)])

    def pages(self, n, count, likely=()):
        """Ids around a table of `count` pages: mostly the likely ones, else any valid one, or 0, negative, the sentinel, past the end."""
        bad = [0, -1, -2, -count - 1, count, count + 1, count + 1000]
        good = range(1, count) if count > 1 else bad
        return [self(self([list(likely) or good, list(likely) or good, list(likely) or good, good, bad])) for _ in range(n)]

    def tokens(self, n, count, page_size, likely=()):
        """Token ids of such pages."""
        return [page * page_size + int(self.rng.integers(page_size)) for page in self.pages(n, count, likely)]

    def tables(self, num_virtual=None):
        """A sub-pool, tiny or of up to a dozen pages, and mostly bound; either side may be the longer."""
        sizes = [1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 12, 12]
        num_virtual = self(sizes) if num_virtual is None else num_virtual
        num_physical = self(sizes)
        virtual = (1 + self.rng.permutation(num_virtual - 1)).tolist()
        physical = (1 + self.rng.permutation(num_physical - 1)).tolist()
        most = min(len(virtual), len(physical))
        bound = self([most, most, most // 2, 0])
        return Tables(num_virtual, num_physical, dict(zip(virtual[:bound], physical[:bound], strict=True)))

    def rows(self, height, model, page_size, granularity="token"):
        """Rows of up to five pages each; a token-granular width need not be whole pages."""
        pages = self.size(5)
        rows = [self.pages(pages, model.num_virtual, model.where) for _ in range(height)]
        if granularity == "token":
            cut = int(self.rng.integers(page_size)) if pages else 0
            rows = [[v * page_size + i for v in row for i in range(page_size)][: pages * page_size - cut] for row in rows]
        return rows

    def requests(self, rows, lanes):
        """Row of each lane: given or not, mostly there, else one before or one past. Without indices lane b has row b."""
        if lanes <= rows and self([False, True]):
            return list(range(lanes)), False
        return self.many(lanes, [*range(rows)] * 4 + [-1, rows]), True

    def view(self, values, dtype=None, axis=-1):
        """A read-only array of the values, int32 or int64, of any stride."""
        return as_view(values, dtype or self([np.int32, np.int64]), self(["plain", "step", "reverse"]), axis)


picks = st.integers(0, 2**32 - 1).map(Pick)
page_sizes = st.sampled_from(PAGE_SIZES)
id_dtypes = st.sampled_from([np.int32, np.int64])
view_styles = st.sampled_from(["plain", "step", "reverse"])


def as_view(values, dtype, style: str = "plain", axis: int = -1) -> np.ndarray:
    """A read-only array of the values, contiguous, with step 2 or with a negative step along `axis`."""
    array = np.asarray(values, dtype=dtype)
    if style == "step":
        view = np.repeat(array, 2, axis=axis).swapaxes(0, axis)[::2].swapaxes(0, axis)
    elif style == "reverse":
        view = np.flip(np.flip(array, axis).copy(), axis)
    else:
        view = array
    assert view.tolist() == array.tolist()
    view.flags.writeable = False
    return view
