"""The intake of arrays and streams: what is read, what is refused and in which words. Device arrays are doubles here, real in test_gpu_calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpukit import arrays, devices, errors, streams
from gpukit.kernels import free_list, metadata, page_table, sliding_window
from gpukit.kernels.free_list import DevicePages


class Interface:
    """Device memory that is only numbers."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str = "<i8",
        strides: tuple[int, ...] | None = None,
        read_only: bool = False,
        stream: int = 0,
        address: int = 4096,
    ):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype,
            "strides": strides,
            "data": (address, read_only),
            "version": 3,
            "stream": stream,
        }


# The protocol is looked up on the type.
Interface.__cuda_array_interface__ = None  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _device_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "of_pointer", lambda pointer: 0)


def test_numpy_arrays_are_read_with_element_strides() -> None:
    base = np.zeros((4, 6), np.int32)
    assert arrays.describe(base)[1:] == ("int32", (4, 6), None, arrays.HOST, True)
    assert arrays.describe(base[::2, 1::3])[2:4] == ((2, 2), (12, 3))
    assert arrays.describe(base.T)[3] == (1, 6)
    base.flags.writeable = False
    assert arrays.describe(base)[5] is False


def test_the_interface_is_read_with_its_flags() -> None:
    assert arrays.describe(Interface((3, 2))) == (4096, "int64", (3, 2), None, 0, True)
    assert arrays.describe(Interface((3, 2), strides=(16, 8)))[3] is None
    assert arrays.describe(Interface((3, 2), strides=(32, 8), read_only=True))[3:] == ((4, 1), 0, False)


def test_host_arrays_of_other_libraries_are_refused_by_name() -> None:
    class OnlyDlpack:
        def __init__(self, array: np.ndarray):
            self._array = array

        def __dlpack__(self, **arguments: Any) -> Any:
            return self._array.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    class Jax(OnlyDlpack):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise AttributeError("an array of the host")

    for kind in (OnlyDlpack, Jax):
        with pytest.raises(TypeError, match="ids: expected a NumPy array or one in device memory, got tests.* in host memory"):
            page_table.translate(kind(np.arange(3)), page_table.empty(3)[0], 1)


def test_what_a_kernel_would_misread_is_refused() -> None:
    records = np.zeros(4, np.dtype([("id", "<i8"), ("other", "<i4")]))
    tables = page_table.empty(4)
    for ids, message in (
        (records["id"], r"virtual_pages: expected strides of whole elements \(8 bytes\), got byte strides \(12,\)"),
        (np.arange(3, dtype=">i8"), "virtual_pages: expected values in this machine's byte order, got dtype >i8"),
        (np.ma.masked_array([1, 2], [True, False]), "virtual_pages: expected a NumPy array or one in device memory"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            page_table.unbind(ids, *tables)
    for interface, message in (
        (Interface((4,), strides=(12,)), "expected strides of whole elements"),
        (Interface((4,), dtype=">i8"), "byte order"),
        (Interface((4,), address=4097), "ids: expected an address aligned to its 8-byte elements, got 0x1001"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            arrays.vector(interface, "ids", ("int64",))


def test_tables_and_outputs_that_share_memory_are_refused() -> None:
    memory, ids = np.zeros(40, np.int64), np.array([1])
    with pytest.raises(errors.ArgumentError, match="p2v: expected a table apart from v2p"):
        page_table.bind(ids, ids, memory[:9], memory[8:20])
    one, two = page_table.empty(9)
    lists = [DevicePages(9) for _ in range(3)]
    with pytest.raises(errors.ArgumentError, match="other_v2p: expected an array apart from owner_v2p"):
        sliding_window.free_segment(np.arange(8), 0, 4, one, two, one, memory[:9], *lists)
    lens = np.ones(3, np.int32)
    outs = {"cu_lengths_out": np.zeros(4, np.int32), "full_out": np.zeros((3, 2), np.int32)}
    with pytest.raises(errors.ArgumentError, match="lengths_out: expected an array apart from lens"):
        metadata.decode_metadata(np.ones((3, 4), np.int64), lens, metadata.AddressSpaces(one), 2, lengths_out=lens, **outs)
    with pytest.raises(errors.ArgumentError, match="out: expected an array apart from free_pages"):
        free_list.gather_decode(np.array([1]), np.array([-1]), memory[:4], 1, out=memory[3:4])


@pytest.mark.parametrize("signal", ["x", 3, object()])
def test_a_signal_that_is_none_is_refused_before_anything_is_written(signal: Any) -> None:
    v2p, p2v = page_table.empty(3)
    v2p[1], p2v[2] = 2, 1
    with pytest.raises(TypeError, match="signal: expected a gpukit.Signal"):
        page_table.unbind(np.array([1]), v2p, p2v, signal=signal)
    assert v2p[1] == 2


def test_what_is_no_array_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"virtual_pages: expected an array .* got list"):
        page_table.unbind([1, 2], *page_table.empty(4))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("virtual_pages", np.zeros(2, np.int16), "virtual_pages: expected dtype int32 or int64, got int16"),
        ("virtual_pages", np.zeros((2, 2), np.int64), r"virtual_pages: expected 1 dimension, got shape \(2, 2\)"),
        ("virtual_pages", np.zeros(8, np.int64)[::2], r"virtual_pages: expected a contiguous array, got element strides \(2,\)"),
        ("v2p", np.zeros(4, np.int32), "v2p: expected dtype int64, got int32"),
        ("v2p", np.zeros(1, np.int64), r"v2p: expected at least 2 rows \(sink and sentinel\), got 1"),
        ("p2v", np.broadcast_to(np.int64(0), (4,)), r"p2v: expected a contiguous array, got element strides \(0,\)"),
        ("out", np.zeros(3, np.int64), r"out: expected shape \(2,\), got \(3,\)"),
        ("out", np.zeros(2, np.int32), "out: expected dtype int64, got int32"),
        ("p2v", Interface((4,)), "p2v: expected an array in host memory like the first argument, got one in device 0"),
    ],
)
def test_a_bad_array_is_named_and_nothing_is_written(argument: str, value: Any, message: str) -> None:
    v2p, p2v = page_table.empty(3)
    v2p[1], p2v[2] = 2, 1
    arguments: dict[str, Any] = {"virtual_pages": np.array([1, 2]), "v2p": v2p, "p2v": p2v, "out": np.array([7, 7])} | {argument: value}
    with pytest.raises(errors.ArgumentError, match=message):
        page_table.unbind(**arguments)
    assert v2p.tolist() == [0, 2, -1, -1] and p2v.tolist() == [0, -1, 1, -1]


def test_a_read_only_table_is_refused() -> None:
    v2p, p2v = page_table.empty(3)
    v2p.flags.writeable = False
    with pytest.raises(errors.ArgumentError, match="v2p: expected a writable array, got a read-only one"):
        page_table.unbind(np.array([1]), v2p, p2v)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"page_size": 2.0}, "page_size: expected an integer, got float"),
        ({"out_width": 3}, "out_width: expected at least 4, got 3"),
        ({"dcp": (2, 2)}, r"dcp: expected \(size, rank\) with 0 <= rank < size, got \(2, 2\)"),
        ({"dcp": (2.0, 0)}, "dcp: expected an integer, got float"),
        ({"dcp": None}, r"dcp: expected \(size, rank\), got None"),
        ({"page_size": 2**31}, "page_size: expected at most 2147483647, got 2147483648"),
        ({"page_size": np.array([4])}, "page_size: expected an integer, got ndarray"),
        ({"v2p": np.zeros(1, np.int64)}, r"v2p: expected at least 2 rows \(sink and sentinel\), got 1"),
        ({"out": np.zeros(3, np.int64)}, r"out: expected shape \(>= 4,\), got \(3,\)"),
    ],
)
def test_translate_names_bad_numbers(changes: dict[str, Any], message: str) -> None:
    arguments = {"ids": np.arange(4), "v2p": page_table.empty(4)[0], "page_size": 2} | changes
    with pytest.raises(errors.ArgumentError, match=message):
        page_table.translate(**arguments)


def test_translate_refuses_an_output_that_overlaps_its_input() -> None:
    v2p, _ = page_table.empty(4)
    memory = np.zeros(12, np.int64)
    with pytest.raises(errors.ArgumentError, match="out: expected ids itself or an array apart from it"):
        page_table.translate(memory[:8], v2p, 2, out=memory[1:9])
    with pytest.raises(errors.ArgumentError, match="out: expected ids itself"):
        page_table.translate(memory.view(np.int32)[:8], v2p, 2, out=memory[:8])
    # Interleaved columns touch, but share nothing.
    pairs = memory.reshape(6, 2)
    page_table.translate(pairs[:, :1], v2p, 2, out=pairs[:, 1:])
    page_table.translate(memory, v2p, 2, out=memory)


def test_bind_range_refuses_a_range_outside_the_table() -> None:
    v2p, p2v = page_table.empty(5, 4)
    for first in (0, 3, -1, 2**70):
        with pytest.raises(errors.ArgumentError, match="first: expected 2 pages within 1 … 3 of p2v"):
            page_table.bind_range(np.array([1, 2]), first, v2p, p2v)
    assert (v2p[1:] == -1).all()


def test_streams_of_every_kind_become_handles() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 11

    kinds = [
        (5, 5),
        (Protocol(), 11),
        (SimpleNamespace(stream=Protocol()), 11),
        (SimpleNamespace(cuda_stream=12), 12),
        (SimpleNamespace(ptr=13), 13),
        (SimpleNamespace(handle=SimpleNamespace(value=None)), 0),
    ]
    assert [streams.handle_of(stream) for stream, _ in kinds] == [handle for _, handle in kinds]
    for wrong in ("0", -1, True, object()):
        with pytest.raises(TypeError, match="stream: expected None, an int handle"):
            streams.handle_of(wrong)


def test_the_interface_says_its_current_stream() -> None:
    assert streams.current(Interface((2,), stream=9)) == 9


def test_overlap_is_exact() -> None:
    even, odd = (4096, 8, (5,), (2,)), (4104, 8, (5,), (2,))
    assert not arrays.overlap(even, odd) and arrays.overlap(even, even) and arrays.overlap(even, (4096 + 8 * 8, 8, (1,), (1,)))
