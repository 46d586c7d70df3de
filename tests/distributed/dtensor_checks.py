"""DTensor arguments: who holds what is read off the placements, and gradients come back with the same ones."""

from __future__ import annotations

import torch
from problems import plain_losses, solve
from ranks import Ranks
from sharding import EVERYTHING, refused, same, small
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from liger_entropy import cross_entropy, linear_cross_entropy, linear_token_statistics


def _mesh(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))


def _leaf(tensor, mesh, *placements) -> DTensor:
    return distribute_tensor(tensor, mesh, placements).detach().requires_grad_()


def _check(x, w, b, p, options) -> None:
    """Against the whole problem: the loss, and gradients with their placements."""
    leaf = p.leaves()
    expected = plain_losses(leaf)["loss"]
    expected.backward()
    loss = linear_cross_entropy(x, w, p.target, linear_bias=b, **options)
    loss.backward()
    same("loss", loss.detach(), expected.detach())
    exact = (leaf.input.grad, leaf.linear_weight.grad, leaf.options["linear_bias"].grad)
    for name, tensor, whole in zip(("input", "weight", "bias"), (x, w, b), exact, strict=True):
        gradient = tensor.grad
        if isinstance(tensor, DTensor):
            assert isinstance(gradient, DTensor) and gradient.placements == tensor.placements, f"{name}: {gradient}"
            gradient = gradient.full_tensor()
        same(f"gradient of {name}", gradient, whole)


def local_shard_is_taken_for_the_whole_weight(ranks: Ranks):
    """Shard(0) (4, 4 and 2 rows), Replicate, and a mesh of two dimensions; every layout of the input."""
    p = small(**EVERYTHING)
    options = {n: v for n, v in p.options.items() if n != "linear_bias"}
    flat, grid = _mesh(ranks), init_device_mesh("cpu", (1, ranks.size), mesh_dim_names=("dp", "tp"))
    for mesh, sharded, whole in (
        (flat, [Shard(0)], [Replicate()]),
        (flat, [Replicate()], [Replicate()]),
        (grid, [Replicate(), Shard(0)], [Replicate(), Replicate()]),
    ):
        inputs = [p.input.clone().requires_grad_(), _leaf(p.input, mesh, *whole)]
        if Shard(0) in sharded:
            inputs.append(_leaf(p.input, mesh, *sharded))
        for x in inputs:
            w, b = _leaf(p.linear_weight, mesh, *sharded), _leaf(p.options["linear_bias"], mesh, *sharded)
            _check(x, w, b, p, options)
        w, b = _leaf(p.linear_weight, mesh, *sharded), _leaf(p.options["linear_bias"], mesh, *whole)
        _check(p.input.clone().requires_grad_(), w, b, p, options)


def tokens_of_a_batch_sharded_over_its_sequence_get_mixed_up(ranks: Ranks):
    """[B, S, D] as a sequence parallel norm leaves it, with labels that are DTensors too."""
    p, mesh = small(names=("linear_bias",)), _mesh(ranks)
    x = p.input.repeat(2, 1).view(2, 5, 6)
    y = p.target.repeat(2).view(2, 5)
    w = _leaf(p.linear_weight, mesh, Shard(0))
    for target in (y, distribute_tensor(y, mesh, [Replicate()]), distribute_tensor(y, mesh, [Shard(1)])):
        s = linear_token_statistics(distribute_tensor(x, mesh, [Shard(1)]), w, target)
        exact = linear_token_statistics(x, p.linear_weight, y)
        same("logprob", s.logprob, exact.logprob)
        same("entropy", s.entropy, exact.entropy)
    on_its_way = distribute_tensor(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()], async_op=True)
    same("logprob", linear_token_statistics(on_its_way, w, y).logprob, exact.logprob)


def class_weights_or_padding_of_a_dtensor_are_ignored(ranks: Ranks):
    p, mesh = small(names=("weight",), label_smoothing=0.1), _mesh(ranks)
    exact = solve(plain_losses, p).values["loss"]
    w = distribute_tensor(torch.nn.functional.pad(p.linear_weight, (0, 0, 0, 2), value=float("nan")), mesh, [Shard(0)])
    c = distribute_tensor(p.options["weight"], mesh, [Shard(0)])
    same("loss", linear_cross_entropy(p.input, w, p.target, weight=c, label_smoothing=0.1, vocab_size=10), exact)


def sharded_logits_are_taken_for_whole_ones(ranks: Ranks):
    p, mesh = small(), _mesh(ranks)
    z = p.input @ p.linear_weight.t()
    sharded = _leaf(z, mesh, Shard(-1))
    loss = cross_entropy(sharded, p.target)
    loss.backward()
    z.requires_grad_()
    torch.nn.functional.cross_entropy(z, p.target).backward()
    same("loss", loss.detach(), solve(plain_losses, p).values["loss"])
    assert sharded.grad.placements == (Shard(1),)
    same("gradient of logits", sharded.grad.full_tensor(), z.grad)


def placement_without_a_meaning_passes(ranks: Ranks):
    """An error that names the argument and its placements."""
    p, mesh = small(), _mesh(ranks)
    x, w, y = p.input, p.linear_weight, p.target
    good = distribute_tensor(w, mesh, [Shard(0)])
    partial = DTensor.from_local(x, mesh, [Partial()])
    cases = [
        ("linear_weight", x, distribute_tensor(w, mesh, [Shard(1)]), y, None),
        ("linear_weight", x, DTensor.from_local(w, mesh, [Partial()]), y, None),
        ("input", partial, good, y, None),
        ("input", distribute_tensor(x, mesh, [Shard(1)]), good, y, None),
        ("input", distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()]), y, None),
        ("input", distribute_tensor(x, mesh, [Shard(0)]), w, y, None),
        ("linear_weight", x, distribute_tensor(w, mesh, [Replicate()]), y, ranks.group),
        ("linear_weight", x, good, y, ranks.group),
    ]
    for name, *tensors, group in cases:
        message = refused(lambda t=tensors, g=group: linear_cross_entropy(*t, process_group=g))
        assert message.startswith(f"{name}: is a DTensor with placements"), message
    same("loss", linear_cross_entropy(x, good, y, process_group=mesh), solve(plain_losses, p).values["loss"])


def data_parallel_shards_are_taken_for_a_parallel_vocabulary(ranks: Ranks):
    """FSDP2's parameters outside their module's call are Shard(0) too, but their ranks hold different tokens."""
    p, mesh = small(), _mesh(ranks)
    w, y = distribute_tensor(p.linear_weight, mesh, [Shard(0)]), p.target.roll(ranks.rank)
    assert "FSDP2" in refused(lambda: linear_cross_entropy(p.input, w, y))
    same(
        "loss",
        linear_cross_entropy(p.input, w.full_tensor(), y),
        torch.nn.functional.cross_entropy(p.input @ p.linear_weight.t(), y),
    )
