"""What goes wrong with liger_kernels=True, as far as a CPU shows it: Liger's kernels are replaced by the same in torch.

tests/gpu/test_liger_kernels.py has the kernels themselves.
"""

import copy
import sys

import pytest
import torch
from comparison import assert_same_run, batch, train
from families import tiny_model
from torch import nn
from transformers.models.llama import modeling_llama

from liger_entropy.huggingface import apply_liger_entropy, liger_kernels, remove_liger_entropy

INPUTS = batch()
ORIGINAL = modeling_llama.apply_rotary_pos_emb


@pytest.fixture
def monkey_patch(monkeypatch):
    """Liger's module, with RMSNorm and RoPE in torch, where a CPU counts as a CUDA device; `calls` counts RoPE's."""
    module = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)

    def norm(self, hidden):
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight + self.offset, self.variance_epsilon)

    def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        module.calls += 1
        return ORIGINAL(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    module.calls = 0
    monkeypatch.setattr(module.LigerRMSNorm, "forward", norm)
    monkeypatch.setattr(module.LigerSwiGLUMLP, "forward", modeling_llama.LlamaMLP.forward)
    monkeypatch.setattr(module, "liger_rotary_pos_emb", rope)
    monkeypatch.setattr(liger_kernels, "_on_cuda", lambda model: True)
    yield module
    del module.calls


@pytest.fixture
def model(monkey_patch):
    return apply_liger_entropy(tiny_model("llama"), liger_kernels=True)


def bound(model):
    return {name for name, module in model.named_modules() if "forward" in module.__dict__}


def test_kernels_compute_something_else(model):
    expected = train(tiny_model("llama"), INPUTS)
    assert_same_run(train(model, INPUTS), expected)
    layers = ("input_layernorm", "post_attention_layernorm", "mlp", "self_attn")
    assert bound(model) == {"model.norm", *(f"model.layers.{i}.{layer}" for i in range(2) for layer in layers)}


def test_rope_reaches_other_models(monkey_patch):
    """The name in the family's module is the original again, yet the instance calls Liger's."""
    other = tiny_model("llama")
    names = dict(vars(modeling_llama))
    model = apply_liger_entropy(tiny_model("llama"), liger_kernels=True)
    assert vars(modeling_llama) == names
    model(**INPUTS)
    assert monkey_patch.calls == 2
    for untouched in (other, tiny_model("llama")):
        untouched(**INPUTS)
        assert not bound(untouched)
    assert monkey_patch.calls == 2


def test_names_that_liger_adds_or_replaces_in_torch_stay(monkey_patch, monkeypatch):
    """As it does for vision towers (torch.nn.LayerNorm), and where the function fails half-way."""

    def apply(model):
        modeling_llama.nn.LayerNorm = modeling_llama.unknown = modeling_llama.LlamaMLP = object
        raise ZeroDivisionError

    before = dict(vars(modeling_llama)), nn.LayerNorm
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", apply)
    with pytest.raises(ZeroDivisionError):
        apply_liger_entropy(tiny_model("llama"), liger_kernels=True)
    assert (dict(vars(modeling_llama)), nn.LayerNorm) == before


def test_removal_leaves_something_behind(monkey_patch):
    model = tiny_model("llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    apply_liger_entropy(model, liger_kernels=True).eval()
    remove_liger_entropy(model)
    for name, module in model.named_modules():
        assert module.__dict__ == {**before[name], "training": False}, name


def test_twice_is_not_once_with_the_later_options(model):
    with_kernels = bound(model)
    apply_liger_entropy(model, liger_kernels=True)
    assert bound(model) == with_kernels
    assert not bound(apply_liger_entropy(model))


def test_copy_computes_with_the_layers_of_the_original(model, monkey_patch):
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert twin.eval()(INPUTS["input_ids"]).logits.eq(0).all()
    assert not model.eval()(INPUTS["input_ids"]).logits.eq(0).all()
    assert monkey_patch.calls == 4
    remove_liger_entropy(twin)
    assert not bound(twin) and bound(model)


def test_other_activation_is_computed_as_silu(monkey_patch):
    """Liger's MLP does not look at the configuration."""
    expected = train(tiny_model("llama", hidden_act="gelu"), INPUTS)
    model = apply_liger_entropy(tiny_model("llama", hidden_act="gelu"), liger_kernels=True)
    assert "model.layers.0.mlp" not in bound(model) and "model.norm" in bound(model)
    assert_same_run(train(model, INPUTS), expected)


def test_losses_of_liger_are_left_in(monkey_patch):
    model = apply_liger_entropy(tiny_model("llama"), liger_kernels=True)
    outputs = model(**INPUTS)
    assert outputs.logits is None and outputs.entropy_loss is not None and "forward" not in model.__dict__
    assert nn.functional.cross_entropy.__module__ == "torch.nn.functional"


def test_replaced_forward_of_a_layer_is_overwritten(monkey_patch):
    model = tiny_model("llama")
    norm = model.model.norm
    norm.forward = forward = norm.forward
    with pytest.warns(UserWarning, match="nothing was applied.*already replaced"):
        apply_liger_entropy(model, liger_kernels=True)
    assert bound(model) == {"model.norm"} and norm.forward is forward


def test_data_parallel_calls_the_layers_of_the_first_device(model):
    with pytest.raises(RuntimeError, match="DataParallel cannot run them"):
        model._replicate_for_data_parallel()


def test_family_without_kernels_is_silent(monkey_patch):
    with pytest.warns(UserWarning, match="no kernels for this family"):
        apply_liger_entropy(tiny_model("gpt2"), liger_kernels=True)


def test_release_that_liger_does_not_take_is_silent(monkeypatch):
    """liger-kernel 0.8.5 raises on import with transformers 4."""
    monkeypatch.setattr(liger_kernels, "_on_cuda", lambda model: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.warns(UserWarning, match="cannot be imported"):
        apply_liger_entropy(tiny_model("llama"), liger_kernels=True)


def test_compiled_model_sees_the_original_rope(model, monkey_patch):
    """Dynamo takes a function's globals from the module of their __name__, where the original is."""
    torch._dynamo.reset()
    expected = train(model, INPUTS)
    monkey_patch.calls = 0
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    got = train(torch.compile(model, backend=backend), INPUTS)
    got.gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in got.gradients.items()}
    assert_same_run(got, expected)
    assert len(graphs) == 1
    assert monkey_patch.calls == 2, "traced once per layer"
