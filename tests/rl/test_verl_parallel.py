"""verl's tensor-parallel call, on two gloo processes."""

import oracle
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from liger_entropy.integrations.verl import linear_cross_entropy

ROWS = (4, 6)  # of the vocabulary on each rank


def _rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    x, w = torch.randn(6, 5, dtype=torch.float64), torch.randn(sum(ROWS), 5, dtype=torch.float64)
    y = torch.tensor([0, 3, 4, 9, -100, 5])
    shard = w.split(ROWS)[rank].clone().requires_grad_()
    x.requires_grad_(), w.requires_grad_()
    logprobs, entropy = linear_cross_entropy(x, shard, y, 0.7, "none", dist.group.WORLD)
    dx, dw = torch.autograd.grad(logprobs.sum() + 2 * entropy.sum(), (x, shard))
    dist.all_reduce(dx)  # as Megatron's region functions do
    want = oracle.statistics(oracle.logits_of(x, w, temperature=0.7), y)
    exact_dx, exact_dw = torch.autograd.grad(want["logprob"].sum() + 2 * want["entropy"].sum(), (x, w))
    exact = (want["logprob"], want["entropy"], exact_dx, exact_dw.split(ROWS)[rank])
    for name, a, b in zip(("logprobs", "entropy", "dx", "dw"), (logprobs, entropy, dx, dw), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"rank {rank}, {n}: {m}")
    dist.destroy_process_group()


def test_ranks_give_the_whole_result_and_their_share_of_the_hidden_gradient(tmp_path):
    """A hidden gradient that is complete on every rank would be counted twice by Megatron's reduce-scatter."""
    mp.spawn(_rank, (str(tmp_path / "store"),), nprocs=2)
