"""DTensor arguments: the local tensors and the process group of a call, with the placements of the gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .distributed import as_group


class Local(NamedTuple):
    """Tensors that this rank works on. ``weight`` None: ``input`` holds given logits, whose classes are last."""

    input: Any
    weight: Any
    target: Any
    bias: Any
    class_weight: Any
    group: dist.ProcessGroup | None  # over which the vocabulary is sharded


def is_dtensor(tensor: Any) -> bool:
    """Without importing torch.distributed.tensor, which takes a second and is there if one exists."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "placements")


def localise(input, weight, target, bias, class_weight, process_group) -> Local:
    """Every DTensor as the local tensor that the operator needs; plain tensors as they are."""
    group = as_group("process_group", process_group)
    if not any(map(is_dtensor, (input, weight, target, bias, class_weight))):
        return Local(input, weight, target, bias, class_weight, group)
    name, owner = ("logits", input) if weight is None else ("linear_weight", weight)
    if is_dtensor(owner):
        dim = _vocabulary_dim(name, owner, owner.ndim - 1 if weight is None else 0)
        group = _group_of(name, owner, dim, group)
        bias = _like(bias, owner)
        owner = owner.to_local()
    if weight is None:
        input = owner
    else:
        weight, input = owner, _tokens("input", input, group, last=input.ndim - 1)
    target = _tokens("target", target, group, last=target.ndim)
    class_weight = class_weight.full_tensor() if is_dtensor(class_weight) else class_weight
    bias = bias.to_local() if is_dtensor(bias) else bias
    return Local(input, weight, target, bias, class_weight, group)


def _refuse(name: str, tensor: Any, wanted: str):
    raise ValueError(f"{name}: is a DTensor with placements {tuple(tensor.placements)}, but expected {wanted}")


def _shards(placement: Any, ndim: int) -> int | None:
    """The dimension that a plain Shard cuts; None for every other placement, FSDP2's _StridedShard included."""
    return placement.dim % ndim if type(placement).__name__ == "Shard" else None


def _vocabulary_dim(name: str, tensor: Any, axis: int) -> int | None:
    """The mesh dimension over which the vocabulary is sharded."""
    sharded = [i for i, p in enumerate(tensor.placements) if not p.is_replicate()]
    if len(sharded) > 1 or any(_shards(tensor.placements[i], tensor.ndim) != axis for i in sharded):
        _refuse(name, tensor, f"Replicate(), and Shard({axis}) on at most one dimension of the mesh")
    return sharded[0] if sharded else None


def _group_of(name: str, tensor: Any, dim: int | None, given: Any) -> Any:
    mesh = tensor.device_mesh
    if dim is None:
        if given is not None:
            _refuse(name, tensor, f"a shard of the vocabulary, since process_group={given!r} is given")
        return None
    group = mesh.get_group(dim)
    if given is not None and given.group_name != group.group_name:
        _refuse(name, tensor, f"no process_group beside it, or the one of its mesh dimension {dim}, got {given!r}")
    return group


def _like(bias: Any, weight: Any) -> Any:
    """The bias, sharded as the weight is."""
    if not is_dtensor(bias):
        return bias
    if any(p.is_partial() for p in bias.placements):
        _refuse("linear_bias", bias, f"the weight's, {tuple(weight.placements)}")
    return bias.redistribute(weight.device_mesh, weight.placements)


def _tokens(name: str, tensor: Any, group: Any, last: int) -> Any:
    """All tokens of a tensor whose dimensions before ``last`` count tokens. Shards over the vocabulary's own ranks
    (sequence parallel layers leave them) are gathered; the gradient of a gathered tensor is complete on every rank."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate  # imported by now, see is_dtensor

    mesh, replicated = tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim
    for dim, placement in enumerate(tensor.placements):
        axis = _shards(placement, tensor.ndim)
        ours = group is not None and mesh.get_group(dim).group_name == group.group_name
        if not placement.is_replicate() and not (ours and axis is not None and axis < last):
            _refuse(name, tensor, "Replicate(), or a Shard of its tokens over the ranks that share the vocabulary")
    return tensor.redistribute(placements=replicated).to_local(grad_placements=replicated)
