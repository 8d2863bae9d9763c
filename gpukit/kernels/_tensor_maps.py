"""Tensor maps: what the device is told of a matrix, rows of which it copies to shared memory, swizzled."""

from __future__ import annotations

import ctypes

from gpukit import devices

# Bytes that are swizzled together; sizeof(TensorMap) of cuda/staging.cuh, which is also what the driver wants a map aligned to.
LINE, _MAP_BYTES = 128, 128


def rows_by_lines(device: int, address: int, row_bytes: int, rows: int, together: int) -> bytes:
    """A map by which a copy brings `together` rows from one of `rows` on, line by line of 128 bytes, each of all of them.

    In a line the place of 16 bytes is their number, xor the line's own, modulo 8. The address is a multiple of 16.

    Raises
    ------
    DeviceError
        The driver refuses.
    """
    bindings, lines = devices.driver(), row_bytes // LINE
    sizes, strides, box = (LINE, rows, lines), (row_bytes, LINE), (LINE, together, lines)
    dimensions = len(sizes)
    # The bindings' own maps are aligned to less than the driver wants.
    storage = ctypes.create_string_buffer(2 * _MAP_BYTES)
    at = ctypes.addressof(storage) + -ctypes.addressof(storage) % _MAP_BYTES
    with devices.current(device):
        status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            int(bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8),
            dimensions,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * dimensions)(*sizes),
            (ctypes.c_uint64 * len(strides))(*strides),
            (ctypes.c_uint32 * dimensions)(*box),
            (ctypes.c_uint32 * dimensions)(*(1,) * dimensions),
            int(bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
            int(bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
    devices.call((bindings.CUresult(status), None), "cuTensorMapEncodeTiled")
    return ctypes.string_at(at, _MAP_BYTES)
