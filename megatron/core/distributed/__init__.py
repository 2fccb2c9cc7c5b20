"""Data parallelism: gradient buffers, their synchronisation and their finalisation."""

from megatron.core.distributed.ddp import DistributedDataParallel
from megatron.core.distributed.finalize import finalize_gradients

__all__ = ["DistributedDataParallel", "finalize_gradients"]
