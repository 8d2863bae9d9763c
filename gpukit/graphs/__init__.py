"""CUDA graphs: capture work of any library that runs on a stream, and replay it at the cost of one launch."""

from gpukit.graphs.capture import Graph, capture

__all__ = ["Graph", "capture"]
