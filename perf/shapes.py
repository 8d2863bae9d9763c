"""The one list of shapes that device tests and benchmarks share. Changing it invalidates every baseline, on purpose."""

from __future__ import annotations

# Ids per call of the page-table ops: one, a decode batch, a large batch, a prefill.
PAGE_COUNTS = (1, 64, 4_096, 65_536)

# Requests per decode batch.
BATCHES = (1, 64, 256, 1_024)

# Page bytes × pages of the page copies: many small pages, many middling ones, few large ones, one.
PAGE_COPIES = ((4_096, 65_536), (65_536, 8_192), (2 << 20, 256), (2 << 20, 1))

# Tokens, key width and value width (elements of two bytes) of a KV store.
KV_STORES = ((64, 1_024, 1_024), (64, 576, 512), (4_096, 1_024, 1_024))

PAGE_SIZE = 64
CONTEXT = 8_192
