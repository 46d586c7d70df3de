"""The forward that is started before the kept rows are known; on a Hopper GPU the default, here put in its place."""

import weakref

import pytest
import torch
from problems import STATISTICS, problem

from liger_entropy import ComputeOptions, engine, linear_token_statistics, ops, planner
from liger_entropy.labels import Labels

BLOCK = 1024
VOCAB = 3 * BLOCK - 100


@pytest.fixture
def started(monkeypatch):
    """Start as a GPU does, one block ahead, and record every forward."""
    forwards, forward = [], engine.Forward
    monkeypatch.setattr(engine, "Forward", lambda *a: forwards.append(forward(*a)) or forwards[-1])
    monkeypatch.setattr(Labels, "are_waited_for", property(lambda labels: labels.drop))
    monkeypatch.setattr(planner, "head_start", lambda *_: BLOCK)
    return forwards


def results(p, **options):
    q = p.leaves()
    s = linear_token_statistics(q.input, q.linear_weight, q.target, options=ComputeOptions(**options), **q.options)
    values = [getattr(s, name) for name in STATISTICS]
    loss = sum(((i + 1) * v).sum() for i, v in enumerate(values[:4]))
    return *values, *torch.autograd.grad(loss, [q.input, q.linear_weight])


@pytest.mark.parametrize("cache_bytes", [0, 1 << 12, 1 << 30])
@pytest.mark.parametrize("chunk_bytes", ["auto", 1 << 20])
@pytest.mark.parametrize("head", [BLOCK, 2 * BLOCK, 100 * BLOCK])
@pytest.mark.parametrize("ignored", [0, 0.5, 2])
def test_forward_that_was_started_gives_something_else(ignored, head, chunk_bytes, cache_bytes, started, monkeypatch):
    options = dict(chunk_bytes=chunk_bytes, cache_bytes=cache_bytes)
    p = problem(6, 4, VOCAB)
    p.target = torch.where(torch.arange(6) < 6 * ignored, -100, torch.arange(6))
    monkeypatch.setattr(planner, "head_start", lambda *_: 0)
    expected = results(p, **options)
    started.clear()
    monkeypatch.setattr(planner, "head_start", lambda *_: head)
    found = results(p, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    kept = int(p.target.ne(-100).sum())
    assert [forward.problem.x.shape[0] for forward in started] == ([6, kept] if ignored else [6])


def test_bad_label_is_found_late_or_its_error_holds_the_cache(started):
    p = problem(6, 4, VOCAB)
    p.target[2] = VOCAB
    with pytest.raises(ValueError, match=f"target: label {VOCAB} at flat position 2") as error:
        results(p, cache_bytes=1 << 30)
    held = weakref.ref(started.pop())
    assert error.value is not None and held() is None


def test_rest_is_launched_after_the_layers_of_autograd(started, monkeypatch):
    """The device has nothing to do by then."""
    left, statistics = [], ops.token_statistics

    def called(*arguments, started):
        left.append(len(list(started.chunks)))
        return statistics(*arguments, started=started)

    monkeypatch.setattr(ops, "token_statistics", called)
    results(problem(6, 4, VOCAB, ignored=0), chunk_bytes=1)
    assert left == [0]


def test_start_that_finds_no_memory_fails(started, monkeypatch):
    """The kept rows may need less."""
    start = ops.start

    def full(*arguments, head=0):
        if head:
            raise torch.OutOfMemoryError
        return start(*arguments)

    p = problem(6, 4, VOCAB)
    expected = results(p)
    monkeypatch.setattr(ops, "start", full)
    p.target[0] = -100
    found = results(p)
    assert found[0][0] == 0 and torch.equal(found[0][1:], expected[0][1:])


def test_head_start_is_a_whole_number_of_blocks():
    pytest.importorskip("triton")
    columns = planner.head_start(8192, 4096, "hopper")
    assert columns % 256 == 0 and 0.3 < 2 * 8192 * 4096 * columns / 700e9 < 0.4
    assert planner.head_start(0, 4096, "hopper") > 0
    assert planner.head_start(8192, 4096, "torch") == planner.head_start(8192, 4096, "triton") == 0
