"""Process groups: what ranks that share a vocabulary tell each other before the work, and the collectives of the work.

Every rank of a group makes the same calls in the same order whatever its labels and its shard are, and learns of
another rank's refusal instead of waiting for it. Without a group nothing here communicates.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .equations import merge

# all_gather_into_tensor goes by a new name from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Facts(NamedTuple):
    """What every rank tells the others, one integer each. 0 stands for "not given"."""

    refused: int = 0  # this rank's arguments raised an error
    rows: int = 0  # of its shard
    class_weights: int = 0  # how many it holds, plus 1
    vocab_size: int = 0  # as declared
    tokens: int = 0
    hidden: int = 0
    labels: int = 0  # a checksum
    temperatures: int = 0  # a checksum of one value per token
    needs_input_gradient: int = 0
    settings: int = 0  # a checksum of everything else that enters the result


_AGREED = {
    "vocab_size": "vocab_size: the ranks of process_group declare",
    "tokens": "input: the ranks of process_group must hold the same tokens, but their counts are",
    "hidden": "input: the hidden sizes on the ranks of process_group are",
    "labels": "target: the ranks of process_group must hold the same labels, but their checksums are",
    "temperatures": "temperature: the ranks of process_group must hold the same values, but their checksums are",
    "needs_input_gradient": "input: requires_grad must be the same on every rank of process_group, but is",
    "settings": "process_group: the ranks disagree on ignore_index, softcap, logit_scale, temperature, the products' "
    "dtype, skip_ignored, check_labels or the outputs wanted; the checksums are",
}
_DATA_PARALLEL = (
    "; a parameter that FSDP2 shards over data-parallel ranks is no shard of a parallel vocabulary: use it inside the "
    "call of its module, where it is gathered, or pass linear_weight.full_tensor()"
)


class Layout(NamedTuple):
    """Where this rank's rows lie in the vocabulary."""

    group: str = ""  # name of the process group, "": this rank holds all of it
    start: int = 0
    vocab_size: int = 0
    rows: tuple[int, ...] = ()  # of all ranks, in the order of the group, which is that of the columns
    class_weights: tuple[int, ...] = ()  # -1: none


def as_group(name: str, group: Any) -> dist.ProcessGroup | None:
    """The process group of an argument: a group, a mesh of one dimension, or None, which stays None."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and getattr(group, "ndim", 0) == 1:
        return group.get_group()
    raise TypeError(
        f"{name}: expected None, a torch.distributed.ProcessGroup that this rank belongs to, or a DeviceMesh of one "
        f"dimension, got {group!r}"
    )


def _group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


@contextmanager
def telling(group: dist.ProcessGroup | None, like: Any) -> Iterator[None]:
    """An error in here reaches the ranks that wait in :func:`agree`."""
    try:
        yield
    except Exception:
        if group is not None:
            _exchange(group, Facts(refused=1), like)
        raise


def _exchange(group: dist.ProcessGroup, facts: Facts, like: Any) -> list[Facts]:
    """The facts of every rank."""
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        device = torch.device("cuda")
    mine = torch.tensor(facts, dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group), len(facts))
    _all_gather(everyone, mine[None], group=group)
    return [Facts(*values) for values in everyone.tolist()]


@torch.compiler.disable(reason="liger_entropy: the sizes of the vocabulary's shards are read from the other ranks")
def agree(
    group: dist.ProcessGroup, facts: Facts, settings: tuple, target: Tensor, temperature: Tensor | None
) -> Layout:
    """The layout of the vocabulary, after one small all-gather in which the ranks check each other's arguments."""
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("process_group: the ranks compare their shards on the host, not in a CUDA graph")
    facts = facts._replace(labels=_checksum(target), settings=zlib.crc32(repr(settings).encode()))
    if temperature is not None:
        facts = facts._replace(temperatures=_checksum(temperature.double()))
    everyone = _exchange(group, facts, target)
    refused = [rank for rank, other in enumerate(everyone) if other.refused]
    if refused:
        raise RuntimeError(f"process_group: rank {refused[0]} of the group refused its arguments; its error says why")
    for field, message in _AGREED.items():
        values = [getattr(other, field) for other in everyone]
        if len(set(values)) > 1:
            raise ValueError(f"{message} {values}{_DATA_PARALLEL if field in ('tokens', 'labels') else ''}")
    rows = tuple(other.rows for other in everyone)
    _check_rows(rows, facts.vocab_size)
    return Layout(
        group.group_name if len(rows) > 1 else "",
        sum(rows[: dist.get_rank(group)]),
        facts.vocab_size or sum(rows),
        rows,
        tuple(other.class_weights - 1 for other in everyone),
    )


def alone(facts: Facts) -> Layout:
    """The layout without a group: no collective, ever."""
    _check_rows((facts.rows,), facts.vocab_size)
    return Layout("", 0, facts.vocab_size or facts.rows, (facts.rows,), (facts.class_weights - 1,))


def _checksum(values: Tensor) -> int:  # [T]
    return zlib.crc32(values.cpu().numpy().tobytes())


def _check_rows(rows: tuple[int, ...], vocab_size: int) -> None:
    if vocab_size > sum(rows) or sum(rows) == 0:
        held = f"{' + '.join(map(str, rows))} = {sum(rows)}" if len(rows) > 1 else sum(rows)
        raise ValueError(f"vocab_size: declared {vocab_size or 'none'}, but the weight has {held} rows")
    if vocab_size and sum(count >= vocab_size for count in rows) > 1:
        raise ValueError(
            f"linear_weight: the ranks of process_group hold {list(rows)} rows, several of them all of "
            f"vocab_size={vocab_size}; pass every rank its own rows, or process_group=None if the weight is not sharded"
        )


def gather_columns(part: Tensor, layout: Layout) -> Tensor:  # [rows of this rank] -> [rows of all ranks]
    """One value per row of the weight, from shards of different sizes."""
    widest = max(layout.rows)
    padded = torch.nn.functional.pad(part, (0, widest - len(part)))
    parts = part.new_empty(len(layout.rows) * widest)
    _all_gather(parts, padded, group=_group(layout.group))
    return torch.cat([parts[rank * widest :][:rows] for rank, rows in enumerate(layout.rows)])


def merge_ranks(state: Tensor, group: str) -> Tensor:  # [FIELDS, R] of this rank -> of the whole vocabulary
    """One all-gather of the packed states, merged as blocks are: the ranks are in the order of their columns."""
    if state.numel() == 0:  # no row is kept, here and on every other rank
        return state
    members = _group(group)
    ranks = dist.get_world_size(members)
    states = state.new_empty(ranks, *state.shape)
    _all_gather(states, state[None].contiguous(), group=members)
    return merge(states)


def start_sum(tensor: Tensor, group: str) -> dist.Work | None:
    """All-reduce in place, beside whatever comes next; the result is there after ``wait()``."""
    return dist.all_reduce(tensor, group=_group(group), async_op=True)


@torch.library.custom_op(
    "liger_entropy::sum_over_ranks", mutates_args=(), schema="(Tensor values, str group) -> Tensor"
)
def sum_over_ranks(values, group):
    """The sum over ranks that hold different tokens. Its gradient is the upstream gradient times the number of ranks:
    what the sum of every rank's loss, all equal to this one, has as its gradient. Averaging over the ranks, as DDP and
    FSDP do, takes that factor away again."""
    total = values.clone()
    dist.all_reduce(total, group=_group(group))
    return total


@sum_over_ranks.register_fake
def _(values, group):
    return torch.empty_like(values)


def _setup(ctx, inputs, output):
    ctx.ranks = dist.get_world_size(_group(inputs[1]))


sum_over_ranks.register_autograd(lambda ctx, gradient: (gradient * ctx.ranks, None), setup_context=_setup)
