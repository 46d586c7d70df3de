"""What goes wrong when nn.DataParallel runs replicas of a patched model in threads; here they share one CPU."""

import sys
import threading

import pytest
import torch
from comparison import assert_close, batch
from families import tiny_model

from liger_entropy.huggingface import apply_liger_entropy
from liger_entropy.huggingface.call import Tally

FULL = batch()
SHARDS = [{name: rows[i : i + 1] for name, rows in FULL.items()} for i in range(2)]


@pytest.fixture
def model():
    return apply_liger_entropy(tiny_model("llama"), token_statistics=True)


@pytest.fixture
def replicate(monkeypatch):
    """Gives two replicas, made by torch's own function; the broadcast between CUDA devices is a copy here."""
    module = sys.modules["torch.nn.parallel.replicate"]

    def broadcast(tensors, devices, detach=False):
        return [[(tensor.detach() if detach else tensor).clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    return lambda model: module.replicate(model, [0, 1])


def run_in_threads(replicas, interleave):
    """The outputs of each replica for its shard, in the order that ``interleave(replicas)`` makes them take."""
    before = interleave(replicas)
    outputs, errors = [None, None], []

    def run(i):
        try:
            before(i)
            outputs[i] = replicas[i](**SHARDS[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return outputs


def nested(replicas):
    """Replica 0 enters, 1 enters, 1 computes, 0 computes, 1 leaves, 0 leaves."""
    events = [threading.Event() for _ in range(3)]
    entered, computed = events[0], events[1:]

    def wait(event):
        assert event.wait(60), "the other replica did not come"

    def on_entry(module, args):
        if module is replicas[0]:
            entered.set()
            wait(computed[1])

    def on_exit(module, args, outputs):
        i = next(i for i, replica in enumerate(replicas) if replica is module)
        computed[i].set()
        wait(computed[1 - i])

    for replica in replicas:
        replica._forward_pre_hooks = {0: on_entry}
        replica._forward_hooks = {0: on_exit}
    return lambda i: wait(entered) if i else None


def alone(model):
    return [model(**shard) for shard in SHARDS]


def test_replicas_keep_their_own_extras(model, replicate):
    """Each replica's entropies are those of its own rows, in whatever order the threads come and go."""
    expected = alone(model)
    assert not torch.equal(expected[0].entropy_loss, expected[1].entropy_loss)
    for got, want in zip(run_in_threads(replicate(model), nested), expected, strict=True):
        assert got.logits is None
        for name in ("loss", "entropy_loss", "token_logprobs", "token_entropy"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_replicas_train_the_model_that_they_copy(model, replicate):
    sum(outputs.loss + outputs.entropy_loss for outputs in alone(model)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    outputs = run_in_threads(replicate(model), nested)
    sum(o.loss + o.entropy_loss for o in outputs).backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name], name, scale=0.1)


def test_replicas_share_what_the_model_notes(model, replicate):
    """The callback's tally gets the tokens of both; a reason that one replica warned about is not said again."""
    model._liger_entropy.tally = Tally.on(torch.device("cpu"))
    alone(model)
    expected, tokens = model._liger_entropy.tally.take()
    replicas = replicate(model)
    run_in_threads(replicas, nested)
    got = model._liger_entropy.tally.take()
    assert got[1] == tokens and got[0] == pytest.approx(expected, rel=1e-6)
    assert all(replica._liger_entropy.noted is model._liger_entropy.noted for replica in replicas)


def test_replicas_leave_the_model_as_it_was(model, replicate):
    run_in_threads(replicate(model), nested)
    assert model._liger_entropy.extras is None and model.lm_head._liger_entropy_call is None
