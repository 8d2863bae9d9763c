"""Registers and stack frame of every kernel in a cubin, read from the file that is shipped.

NVIDIA's ELF sections ``.nv.info`` hold attribute records: format byte, attribute byte, 16-bit size, payload. A spill or a local array always shows as
stack frame, so a frame of 0 says there is neither.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

_SIZED, _FRAME_SIZE, _REGISTERS = 0x04, 0x11, 0x2F


@dataclass(frozen=True)
class Resources:
    """What a kernel uses per thread."""

    registers: int
    frame_bytes: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """Kernel name → resources."""
    elf = ELFFile(io.BytesIO(cubin))
    symbols = elf.get_section_by_name(".symtab")
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    data = elf.get_section_by_name(".nv.info").data()
    position = 0
    while position < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _SIZED:
            continue
        if attribute in (_FRAME_SIZE, _REGISTERS):
            symbol, value = struct.unpack_from("<II", data, position)
            (registers if attribute == _REGISTERS else frames)[symbols.get_symbol(symbol).name] = value
        position += size
    return {name: Resources(registers[name], frames.get(name, 0)) for name in registers}
