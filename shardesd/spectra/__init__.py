"""Matrix → eigenvalues. Knows nothing of files, names or devices' queues."""

from shardesd.spectra.eigen import batch_size, why_not_batched
from shardesd.spectra.policy import trouble
from shardesd.spectra.solve import compute, compute_many, compute_product, device_bytes, work_bytes
from shardesd.spectra.worker import blas_threads, prepare_worker

__all__ = [
    "batch_size",
    "blas_threads",
    "compute",
    "compute_many",
    "compute_product",
    "device_bytes",
    "prepare_worker",
    "trouble",
    "why_not_batched",
    "work_bytes",
]
