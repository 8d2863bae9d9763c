"""Device functions that turn virtual tokens and pages into physical ones, under the sink rules; used by several subjects."""

from __future__ import annotations

from gpukit.compile.device import OUT_OF_RANGE, UNBOUND, count, device_function, int64, is_null, uint32

# What `find_page` answers where there is no page.
NOT_BOUND, PAST, PADDING = -1, -2, -3


@device_function
def divide(value, page_size, shift):
    # Ids that reach here are not negative, so a shift and a truncating division both floor.
    if shift >= 0:
        return value >> shift
    if value < 2147483648 and page_size < 2147483648:
        # 32-bit division is several times cheaper, and nearly every id fits.
        return int64(uint32(value) // uint32(page_size))
    return value // page_size


@device_function
def find_page(page, v2p, rows):
    # Physical page of a virtual page; PADDING, PAST or NOT_BOUND, all negative, where there is none. Without a table the page itself.
    if page < 0:
        return int64(PADDING)
    if is_null(v2p):
        return page
    if page > rows - 2:
        return int64(PAST)
    return max(v2p[page], int64(NOT_BOUND))


@device_function
def count_missing(physical, times, signal):
    # Count what `find_page` did not find; padding is ordinary.
    if physical == PAST:
        count(signal, OUT_OF_RANGE, times)
    elif physical == NOT_BOUND:
        count(signal, UNBOUND, times)


@device_function
def translate_page(page, v2p, rows, signal):
    # Physical page of a virtual page; the sink for padding, pages past the table and unbound ones.
    physical = find_page(page, v2p, rows)
    count_missing(physical, 1, signal)
    return max(physical, int64(0))


@device_function
def location_in(physical, page_size, offset):
    # Physical token, 0 where the page was not found.
    if physical < 0:
        return int64(0)
    return physical * page_size + offset


@device_function
def translate_id(token, v2p, rows, page_size, shift, signal):
    # Physical token of a virtual token; the sink for padding, ids past the table and unbound pages.
    if token < 0:
        return int64(0)
    page = divide(token, page_size, shift)
    physical = find_page(page, v2p, rows)
    count_missing(physical, 1, signal)
    return location_in(physical, page_size, token - page * page_size)
