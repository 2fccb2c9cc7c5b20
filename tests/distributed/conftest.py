"""Warm imports that torch does lazily, so that forked ranks inherit them."""

from __future__ import annotations

import sympy  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.tensor
import torch.testing

torch.testing.assert_close(torch.ones(1), torch.ones(1))
