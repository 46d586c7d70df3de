"""torch.compile traces through the patch: the whole model, its loss and its statistics are one graph."""

import pytest
import torch
from comparison import assert_close, assert_same_run, batch, evaluate, train
from families import tiny_model
from torch import nn

from liger_entropy.huggingface import apply_liger_entropy, is_patched

INPUTS = batch()
# aot_eager traces forward and backward as inductor does and leaves out its code generation, most of the time.
COMPILE = dict(backend="aot_eager", fullgraph=True)


IDS, LABELS = INPUTS["input_ids"], INPUTS["labels"]


class Small(nn.Module):
    """Compiles in a second, unlike a transformer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, ids, labels=None):
        logits = self.lm_head(self.embed(ids)) / 2
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 97), labels.view(-1)), "logits": logits}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whole_model_is_one_graph(family):
    plain = tiny_model(family, num_hidden_layers=1)
    model = torch.compile(
        apply_liger_entropy(tiny_model(family, num_hidden_layers=1), token_statistics=True), **COMPILE
    )
    expected, got = train(plain, INPUTS), train(model, INPUTS)
    assert_same_run(_unprefixed(got), expected)
    assert got.outputs.logits is None and got.outputs.token_entropy.shape == INPUTS["labels"].shape
    assert not torch._dynamo.utils.counters["graph_break"]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(model, INPUTS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 1


def _unprefixed(run):
    run.gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in run.gradients.items()}
    return run


def test_patch_after_compile():
    """PAT-28: the compiled graph must not keep the class's own forward."""
    plain, patched = Small(), Small()
    model = torch.compile(patched, **COMPILE)
    model(IDS, labels=LABELS)
    apply_liger_entropy(model, entropy_coef=0.5)
    assert is_patched(model)
    got = model(IDS, labels=LABELS)
    assert got["logits"] is None
    assert_close(got["loss"], plain(IDS, labels=LABELS)["loss"] - 0.5 * got["entropy_loss"])


def test_eval_and_generation_inputs():
    plain = tiny_model("llama", num_hidden_layers=1)
    model = torch.compile(apply_liger_entropy(tiny_model("llama", num_hidden_layers=1)), **COMPILE)
    expected, got = evaluate(plain, INPUTS, use_cache=False), evaluate(model, INPUTS, use_cache=False)
    assert_close(got.loss, expected.loss)
    assert_close(got.logits, expected.logits)
    ids = {"input_ids": INPUTS["input_ids"]}
    assert_close(evaluate(model, ids, use_cache=False).logits, evaluate(plain, ids, use_cache=False).logits)


def test_head_with_maths_of_its_own_is_right_when_compiled():
    plain, patched = Small(), Small()
    for model in (plain, patched):
        model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    compiled = torch.compile(apply_liger_entropy(patched), backend="aot_eager")
    with pytest.warns(UserWarning, match="not fused.*forward hook"):
        got = compiled(IDS, labels=LABELS)
    expected = plain(IDS, labels=LABELS)
    assert_close(got["loss"], expected["loss"])
    torch.autograd.backward([got["loss"], expected["loss"]])
    assert_close(patched.lm_head.weight.grad, plain.lm_head.weight.grad)
