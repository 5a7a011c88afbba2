"""Stands where SGLang 0.5.10 looks for its CUDA kernels; on a CPU it imports their names and calls none."""
