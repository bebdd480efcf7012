"""Matrix → eigenvalues. Knows nothing of files, names or devices' queues."""

from shardesd.spectra.eigen import batch_size, is_large, missing_batched, why_not_batched
from shardesd.spectra.fortran import blas_threads
from shardesd.spectra.gram import count_bytes, count_cuda
from shardesd.spectra.policy import Precision, choose_precision, trouble
from shardesd.spectra.solve import (
    PASSING_BYTES,
    compute,
    compute_many,
    compute_product,
    device_bytes,
    drowned,
    passing_bytes,
    work_bytes,
)
from shardesd.spectra.staging import drop_buffers
from shardesd.spectra.tally import Part, Tallied
from shardesd.spectra.upload import Open
from shardesd.spectra.worker import prepare_worker

__all__ = [
    "PASSING_BYTES",
    "Open",
    "Part",
    "Precision",
    "Tallied",
    "batch_size",
    "blas_threads",
    "choose_precision",
    "compute",
    "compute_many",
    "compute_product",
    "count_bytes",
    "count_cuda",
    "device_bytes",
    "drop_buffers",
    "drowned",
    "is_large",
    "missing_batched",
    "passing_bytes",
    "prepare_worker",
    "trouble",
    "why_not_batched",
    "work_bytes",
]
