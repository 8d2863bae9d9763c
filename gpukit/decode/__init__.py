"""The composed decode round. `run` replays a request trace and checks every step, without a model, over one of two memories: *unified*, one buffer
whose rounds are a launch each (`gpukit.memory`), or *split*, two pools whose rounds are single paging ops. `run_model` decodes with the recurrent
layers of a model and the experts behind them, plainly and speculatively, and checks that both agree.

>>> from gpukit import decode
>>> report = decode.run(decode.DecodeOptions(requests=10, batch=4, pages=512, swa_pages=64, backend="numpy"))
>>> report.ok
True
>>> decode.run_model(decode.ModelOptions(tokens=4, backend="numpy")).ok
True
"""

from gpukit.decode.model_run import ModelOptions, ModelReport, ModelRun, run_model
from gpukit.decode.options import DecodeOptions
from gpukit.decode.replay import Replay, run
from gpukit.decode.report import DecodeReport
from gpukit.decode.trace import Request, generate_trace, read_trace

__all__ = [
    "DecodeOptions",
    "DecodeReport",
    "ModelOptions",
    "ModelReport",
    "ModelRun",
    "Replay",
    "Request",
    "generate_trace",
    "read_trace",
    "run",
    "run_model",
]
