"""Warm imports, which the forked ranks inherit."""

from __future__ import annotations

import sympy  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.tensor  # noqa: F401

import megatron.training.failures  # noqa: F401
import megatron.training.trainer  # noqa: F401
