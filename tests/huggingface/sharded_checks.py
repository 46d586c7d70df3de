"""Patched models trained in wrappers that shard the data or the parameters, against one process with none of this.

Every step has two micro-batches, and only the second synchronises. Losses are sums over the number of kept tokens of
the step in all ranks, times the number of ranks, as the Trainer does: the ranks' average is then the mean over tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from comparison import assert_close
from families import tiny_model
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_entropy.huggingface import apply_liger_entropy, is_patched
from liger_entropy.huggingface.callback import _over_processes

MICRO, STEPS, RATE = 2, 2, 1.0


def _model(bias: bool = False) -> nn.Module:
    model = tiny_model("llama")
    if bias:
        weight = model.lm_head.weight
        model.lm_head = nn.Linear(weight.shape[1], weight.shape[0])
    return model


def _batch(step: int, micro: int, rank: int) -> dict:
    """Each rank keeps another number of tokens; the second rank keeps none."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(4, 97, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, : 1 + 3 * rank + micro] = -100
    if rank == 1:
        labels[:] = -100
    return dict(input_ids=ids, labels=labels)


def _items(step: int, size: int) -> int:
    labels = [_batch(step, micro, rank)["labels"] for micro in range(MICRO) for rank in range(size)]
    return sum(int((y[:, 1:] != -100).sum()) for y in labels)


def _trained(model: nn.Module, ranks: list[int], size: int, unsynced=nullcontext) -> torch.Tensor:
    """The loss of every step on the data of ``ranks`` out of ``size``, after SGD in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scale = size / len(ranks)
    losses = []
    for step in range(STEPS):
        losses.append(torch.zeros(()))
        for micro, rank in [(m, r) for m in range(MICRO) for r in ranks]:
            with nullcontext() if micro == MICRO - 1 else unsynced():
                loss = model(**_batch(step, micro, rank), num_items_in_batch=_items(step, size)).loss
                (loss * scale).backward()
            losses[-1] += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@functools.cache
def _expected(size: int, bias: bool) -> tuple[torch.Tensor, dict, dict]:
    """Losses, first weights and moves of the unpatched model in one process on the data of all ranks."""
    model = _model(bias)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = _trained(model, list(range(size)), size)
    return losses, start, {name: p.detach() - start[name] for name, p in model.named_parameters()}


def _check(ranks: Ranks, model: nn.Module, unsynced, weights, bias: bool = False, fused: bool = True) -> None:
    losses = _trained(model, [ranks.rank], ranks.size, unsynced)
    _compare(ranks, model, losses, weights(model), bias, fused)


def _compare(ranks: Ranks, model: nn.Module, losses, got: dict, bias: bool = False, fused: bool = True) -> None:
    """This rank's losses, and the weights ``got``, are those of one process; the model was patched (and fused)."""
    expected, start, moves = _expected(ranks.size, bias)
    dist.all_reduce(losses, group=ranks.group)
    assert_close(losses, expected, "losses")
    assert got.keys() == moves.keys()
    largest = max(move.abs().max().item() for move in moves.values())
    for name, move in moves.items():
        assert_close(got[name] - start[name], move, name, scale=largest)
    assert is_patched(model)
    noted = [reason for m in model.modules() if hasattr(m, "_liger_entropy") for reason in m._liger_entropy.noted]
    assert bool(noted) != fused, noted


def _parameters(model: nn.Module) -> dict:
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


def _full_parameters(model: nn.Module) -> dict:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def ddp_waits_for_a_head_that_a_rank_without_tokens_left_out(ranks: Ranks):
    """SHP-06, DIST-15, DIST-17: patched before and after wrapping; the bias too has a gradient in every step."""
    for first in (True, False):
        model = apply_liger_entropy(_model(bias=True)) if first else _model(bias=True)
        model = DistributedDataParallel(model, process_group=ranks.group)
        _check(ranks, model if first else apply_liger_entropy(model), model.no_sync, _parameters, bias=True)


def ddp_averages_means_and_the_rank_without_tokens_counts_as_zero(ranks: Ranks):
    """SHP-06 without a count: every rank ends with the same gradient, 1/size of the sum of the others'."""
    model = DistributedDataParallel(apply_liger_entropy(_model(bias=True)), process_group=ranks.group)
    model(**_batch(0, 0, ranks.rank)).loss.backward()
    reference = _model(bias=True)
    for rank in [r for r in range(ranks.size) if r != 1]:
        (reference(**_batch(0, 0, rank)).loss / ranks.size).backward()
    for (name, p), q in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, name, scale=0.1)


@functools.cache
def _mesh(size: int):
    return init_device_mesh("cpu", (size,))


def _fully_sharded(ranks: Ranks, units, first: bool) -> nn.Module:
    model = apply_liger_entropy(_model()) if first else _model()
    for unit in (*model.model.layers, *units(model), model):
        fully_shard(unit, mesh=_mesh(ranks.size))
    return model if first else apply_liger_entropy(model)


def _check_fully_sharded(ranks: Ranks, units) -> None:
    for first in (True, False):
        model = _fully_sharded(ranks, units, first)

        def unsynced(model=model):
            model.set_requires_gradient_sync(False)
            return _Restoring(model)

        _check(ranks, model, unsynced, _full_parameters)


class _Restoring(nullcontext):
    def __exit__(self, *raised):
        self.enter_result.set_requires_gradient_sync(True)


def head_in_the_root_unit_of_fsdp2_is_read_as_a_shard(ranks: Ranks):
    _check_fully_sharded(ranks, lambda model: [])


def head_as_its_own_unit_of_fsdp2_is_never_gathered(ranks: Ranks):
    """DIST-03."""
    _check_fully_sharded(ranks, lambda model: [model.lm_head])


def head_in_one_unit_of_fsdp2_with_the_norm_is_freed_too_early(ranks: Ranks):
    """DIST-18."""
    _check_fully_sharded(ranks, lambda model: [[model.model.norm, model.lm_head]])


def _fsdp1(ranks: Ranks, head: bool, first: bool) -> nn.Module:
    wrap = functools.partial(FullyShardedDataParallel, process_group=ranks.group, use_orig_params=True)
    wrap = functools.partial(wrap, device_id=torch.device("cpu"))
    model = apply_liger_entropy(_model()) if first else _model()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = wrap(layer)
    if head:
        model.lm_head = wrap(model.lm_head)
    model = wrap(model)
    return model if first else apply_liger_entropy(model)


def _summoned_parameters(model) -> dict:
    with FullyShardedDataParallel.summon_full_params(model):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}


def head_in_the_root_unit_of_fsdp1_is_read_as_a_flat_shard(ranks: Ranks):
    for first in (True, False):
        model = _fsdp1(ranks, head=False, first=first)
        _check(ranks, model, model.no_sync, _summoned_parameters)


def head_as_its_own_unit_of_fsdp1_is_read_as_a_flat_shard(ranks: Ranks):
    """DIST-04: the wrapper is called as it is."""
    for first in (True, False):
        model = _fsdp1(ranks, head=True, first=first)
        _check(ranks, model, model.no_sync, _summoned_parameters, fused=False)


def callback_averages_the_means_of_ranks(ranks: Ranks):
    got = _over_processes((1.5 + ranks.rank, 2 * ranks.rank), torch.device("cpu"))
    assert got == (sum(1.5 + r for r in range(ranks.size)), sum(2 * r for r in range(ranks.size)))


def weight_that_zero3_partitioned_is_read_empty(ranks: Ranks):
    """DIST-01, DIST-02: patched before and after deepspeed.initialize."""
    if importlib.util.find_spec("deepspeed") is None:
        return  # test_sharded.py skips it by name
    os.environ["LOCAL_RANK"] = str(ranks.rank)  # without DeepSpeed's launcher
    for first in (True, False):
        engine = _zero3(apply_liger_entropy(_model()) if first else _model())
        if not first:
            apply_liger_entropy(engine.module)
        assert engine.module.lm_head.weight.numel() == 0
        losses = _trained_by_engine(engine, ranks)
        _compare(ranks, engine.module, losses, _gathered_parameters(engine.module))


def _zero3(model: nn.Module):
    import deepspeed

    # All collectives by gloo: the op that would replace one of inference is compiled, for which ninja and g++ may lack.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Buckets of the default size take gigabytes. Gradients are clipped to a norm of 1 unless told otherwise.
    zero = dict(stage=3, stage3_param_persistence_threshold=0, reduce_bucket_size=20000,
                stage3_prefetch_bucket_size=20000, stage3_max_live_parameters=100000)  # fmt: skip
    config = dict(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=MICRO, gradient_clipping=0.0)
    config |= dict(zero_optimization=zero, zero_allow_untested_optimizer=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _trained_by_engine(engine, ranks: Ranks) -> torch.Tensor:
    losses = torch.zeros(STEPS)
    for step, micro in [(s, m) for s in range(STEPS) for m in range(MICRO)]:
        outputs = engine(**_batch(step, micro, ranks.rank), num_items_in_batch=_items(step, ranks.size))
        assert outputs.logits is None and outputs.entropy_loss is not None
        # The count is that of the whole step, so that the engine must not divide by the number of micro-batches.
        engine.backward(outputs.loss * ranks.size, scale_wrt_gas=False)
        engine.step()
        losses[step] += outputs.loss.detach()
    return losses


def _gathered_parameters(model: nn.Module) -> dict:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
