"""Matrix → eigenvalues. Knows nothing of files, names or devices' queues."""

from shardesd.spectra.solve import blas_threads, compute, is_out_of_memory, prepare_worker, work_bytes

__all__ = ["blas_threads", "compute", "is_out_of_memory", "prepare_worker", "work_bytes"]
