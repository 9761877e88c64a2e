"""Block formats in Triton: the bytes of `farloop.quant.reference`, at the speed of a GPU's memory.

Importing this loads nothing; `host.py` loads Triton, so import that only where a CUDA device will be used.
"""
