"""Block formats in Triton: the bytes of `farloop.quant.formats`, at the speed of a GPU's memory.

Importing this package loads nothing; its modules load Triton, so import them only where a CUDA device will be used.
"""
