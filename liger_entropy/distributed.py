"""Merging statistics over the ranks that share a vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .equations import merge


def _group(name: str) -> dist.ProcessGroup:
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def merge_ranks(state: Tensor, group: str) -> Tensor:  # [FIELDS, R] of this rank -> of the whole vocabulary
    """One all-gather of the packed states, merged as blocks are; ranks are in the order of their columns."""
    members = _group(group)
    states = state.new_empty(dist.get_world_size(members), *state.shape)
    dist.all_gather_into_tensor(states, state.contiguous(), group=members)
    return merge(states)


def sum_ranks(tensor: Tensor, group: str) -> None:
    """All-reduce in place."""
    dist.all_reduce(tensor, group=_group(group))
