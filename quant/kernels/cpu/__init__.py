"""The formats' arithmetic on CPUs, compiled by numba at first use. The bytes are those of `formats/`."""
