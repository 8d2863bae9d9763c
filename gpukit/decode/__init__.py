"""The composed decode round: replays a request trace through the paging ops and checks every step. No model runs here.

>>> from gpukit import decode
>>> report = decode.run(decode.DecodeOptions(requests=10, batch=4, pages=512, swa_pages=64, backend="numpy"))
>>> report.ok
True
"""

from gpukit.decode.options import DecodeOptions
from gpukit.decode.replay import Replay, run
from gpukit.decode.report import DecodeReport
from gpukit.decode.trace import Request, generate_trace, read_trace

__all__ = ["DecodeOptions", "DecodeReport", "Replay", "Request", "generate_trace", "read_trace", "run"]
