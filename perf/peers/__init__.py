"""What gpukit is measured beside, in the same run: own Triton kernels that do the same work. Imported only by the benchmarks."""
