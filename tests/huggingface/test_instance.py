"""The patch belongs to one instance and stands what people do to instances."""

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from comparison import assert_close, assert_same_run, batch, evaluate, train
from families import tiny_model
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import BertConfig, BertModel, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.utils import find_labels

from liger_entropy.huggingface import apply_liger_entropy, is_patched, remove_liger_entropy

INPUTS = batch()
IDS, LABELS = INPUTS["input_ids"], INPUTS["labels"]


@pytest.fixture
def plain():
    return tiny_model("llama")


@pytest.fixture
def model():
    return apply_liger_entropy(tiny_model("llama"), token_statistics=True)


def is_fused(model) -> bool:
    model.train()
    return model(**INPUTS).logits is None and not model._liger_entropy.noted


def test_other_instances_are_untouched(plain, model):
    """PAT-11: one made before, one made after, and the class."""
    for other in (plain, tiny_model("llama")):
        assert type(other) is LlamaForCausalLM and type(other.lm_head) is nn.Linear
        assert other.train()(**INPUTS).logits is not None and not is_patched(other)
    assert "forward" not in model.__dict__ and isinstance(model, LlamaForCausalLM)


def test_remove_restores_the_instance(model):
    assert remove_liger_entropy(model) is model
    assert type(model) is LlamaForCausalLM and type(model.lm_head) is nn.Linear
    assert not [name for name in (*model.__dict__, *model.lm_head.__dict__) if "liger" in name]
    assert model(**INPUTS).logits is not None and not is_patched(model)
    assert remove_liger_entropy(model) is model


def test_twice_is_once_with_the_later_options(plain):
    """PAT-12: also on Gemma2, whose softcap must act once."""
    for family in ("llama", "gemma2"):
        model = apply_liger_entropy(tiny_model(family), entropy_coef=1.0)
        depth = len(type(model).__mro__)
        apply_liger_entropy(model)
        assert len(type(model).__mro__) == depth
        assert_same_run(train(model, INPUTS), train(tiny_model(family), INPUTS))


def test_signature_is_the_models_own(plain, model):
    """PAT-02: the Trainer reads the var-keyword from it, find_labels the labels."""
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert find_labels(type(model)) == find_labels(type(plain)) == ["labels"]
    assert getattr(model, "accepts_loss_kwargs", None) == getattr(plain, "accepts_loss_kwargs", None)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_graph_is_freed_without_the_garbage_collector(model):
    """A cycle through the patch would hold the hidden states of a step until Python happens to collect it."""
    seen = []
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        for arguments in (INPUTS, {**INPUTS, "skip_logits": False}):
            model.train()(**arguments).loss.backward()
            assert seen.pop()() is None
    finally:
        gc.enable()


def test_state_dict_is_the_same_tensors(plain):
    """PAT-23."""
    before = {k: v.data_ptr() for k, v in plain.state_dict().items()}
    names = [name for name, _ in plain.named_parameters()]
    apply_liger_entropy(plain)
    assert {k: v.data_ptr() for k, v in plain.state_dict().items()} == before
    assert [name for name, _ in plain.named_parameters()] == names


def test_saved_model_loads_without_the_patch(model, tmp_path):
    logits = evaluate(model, {"input_ids": IDS}).logits
    model.save_pretrained(tmp_path)
    assert "liger" not in (tmp_path / "config.json").read_text()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(evaluate(loaded, {"input_ids": IDS}).logits, logits)


def _torch_saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _torch_saved])
def test_copies_are_patched_and_independent(model, duplicate):
    other = duplicate(model)
    assert is_patched(other) and is_fused(other)
    assert_same_run(train(other, INPUTS), train(model, INPUTS))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert train(other, INPUTS).loss != train(model, INPUTS).loss, "the copy's forward is bound to the original"
    remove_liger_entropy(other)
    assert is_fused(model)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_generate_gives_the_same_tokens(plain, model, options):
    """PAT-22."""
    options |= dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(IDS))
    assert torch.equal(model.eval().generate(IDS, **options), plain.eval().generate(IDS, **options))


def test_tied_weights_get_both_gradients():
    """PAT-20: and a resized vocabulary, whose head is another module, is read at call time."""
    plain = tiny_model("llama", tie_word_embeddings=True)
    model = apply_liger_entropy(tiny_model("llama", tie_word_embeddings=True))
    assert_same_run(train(model, INPUTS), train(plain, INPUTS))
    for m in (plain, model):
        torch.manual_seed(0)
        m.resize_token_embeddings(101)
    assert_same_run(train(model, INPUTS), train(plain, INPUTS))
    assert is_fused(model)


def test_replaced_head_is_fused():
    """An untied head replaced after the patch."""
    model = apply_liger_entropy(tiny_model("llama"))
    model.resize_token_embeddings(101)
    assert model.lm_head.weight.shape[0] == 101 and is_fused(model)


class DoublingHead(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def _subclass(model):
    head = DoublingHead(32, 97, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


def _hook(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def _instance_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(hidden) * 2


@pytest.mark.parametrize("change", [_subclass, _hook, _instance_forward])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*not fused")
def test_head_with_maths_of_its_own_is_called(plain, change, when):
    """PAT-27: the loss is right, the entropy is that of the doubled logits, a warning says why."""
    model = tiny_model("llama")
    change(plain)
    if when == "before":
        change(model)
    apply_liger_entropy(model, entropy_coef=0.0)
    if when == "after":
        change(model)
    got = train(model, INPUTS)
    assert_same_run(got, train(plain, INPUTS))
    assert model._liger_entropy.noted
    logprobs = plain(IDS).logits[:, :-1][LABELS[:, 1:] != -100].log_softmax(-1)
    assert_close(got.outputs.entropy_loss.detach(), -(logprobs.exp() * logprobs).sum(-1).mean().detach())


@pytest.mark.filterwarnings("ignore:.*not fused")
def test_hooks_on_all_modules_act_on_the_head(plain):
    """A forward hook must see logits; a pre-hook acts inside the head's own call."""
    model = apply_liger_entropy(tiny_model("llama"))
    doubled = lambda m, value: value * 2 if isinstance(m, nn.Linear) and m.out_features == 97 else None  # noqa: E731
    for register, hook, fused in (
        (register_module_forward_pre_hook, lambda m, args: doubled(m, args[0]) if args else None, True),
        (register_module_forward_hook, lambda m, args, output: doubled(m, output), False),
    ):
        handle = register(hook)
        try:
            assert_same_run(train(model, INPUTS), train(plain, INPUTS))
        finally:
            handle.remove()
        assert bool(model._liger_entropy.noted) != fused


@pytest.mark.filterwarnings("ignore:.*not fused")
def test_options_hold_where_the_loss_is_not_fused(plain):
    model = apply_liger_entropy(tiny_model("llama"), entropy_coef=0.5)
    _hook(model), _hook(plain)
    logits = plain(IDS).logits[:, :-1][LABELS[:, 1:] != -100]
    logprobs = logits.log_softmax(-1)
    h = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert_close(train(model, INPUTS).loss, (plain(**INPUTS).loss - 0.5 * h).detach())


def test_parametrized_head_is_fused_with_its_computed_weight(plain):
    model = apply_liger_entropy(tiny_model("llama"))
    for m in (plain, model):
        nn.utils.parametrizations.weight_norm(m.lm_head)
    assert_same_run(train(model, INPUTS), train(plain, INPUTS))
    assert is_fused(model)


def test_pre_hook_on_the_head_acts_on_its_input(plain):
    model = apply_liger_entropy(tiny_model("llama"))
    for m in (plain, model):
        m.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    assert_same_run(train(model, INPUTS), train(plain, INPUTS))
    assert is_fused(model)


def test_head_hooks_see_one_call_per_forward(model):
    """DIST-03: a hook that only counts; the head is then called as always."""
    calls = []
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(args[0].numel()))
    train(model, INPUTS)
    assert calls == [2 * 16 * 32]


def test_weight_may_be_gathered_by_hooks_of_the_head(plain):
    """DIST-01: as ZeRO-3 does, the weight is empty outside the head's own call."""
    model = apply_liger_entropy(tiny_model("llama"))
    full = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data = torch.empty(0)
    model.lm_head.register_forward_pre_hook(lambda module, args: setattr(module.weight, "data", full))
    assert_same_run(train(model, INPUTS), train(plain, INPUTS))


def test_flat_shard_of_a_weight_is_named(model):
    """DIST-04: FSDP1 around the head alone leaves a 1-D shard; never the local shard as if it were whole."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().reshape(-1)[: 97 * 16])
    with pytest.raises(ValueError, match="FSDP"):
        train(model, INPUTS)


@pytest.mark.parametrize("module", [nn.Linear(4, 5), nn.ReLU(), BertModel(BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=97))])  # fmt: skip
def test_module_without_an_output_embedding_is_refused(module):
    """PAT-29."""
    with pytest.raises(TypeError, match=f"{type(module).__name__} has no output embedding"):
        apply_liger_entropy(module)
    with pytest.raises(TypeError, match="expected a torch"):
        apply_liger_entropy("model")
    assert not is_patched(module)


def test_several_heads_are_refused():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])

    with pytest.raises(TypeError, match="ModuleList"):
        apply_liger_entropy(TwoHeads())


def test_encoder_decoder_is_not_shifted():
    """PAT-29: T5 takes its labels as they are."""
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=97, decoder_start_token_id=0)
    torch.manual_seed(0)
    plain = T5ForConditionalGeneration(config)
    model = apply_liger_entropy(copy.deepcopy(plain), token_statistics=True)
    for m in (plain, model):
        m.eval()  # no dropout
    expected, got = plain(**INPUTS), model(**INPUTS, skip_logits=True)
    assert got.logits is None
    assert_close(got.loss.detach(), expected.loss.detach())
    assert torch.equal(got.token_entropy != 0, LABELS != -100)


@pytest.mark.parametrize("options", [dict(label_smoothing=1.5), dict(entropy_coef=float("nan"))])
def test_options_out_of_range_leave_the_model_alone(plain, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        apply_liger_entropy(plain, **options)
    assert not is_patched(plain) and type(plain) is LlamaForCausalLM


def test_forward_replaced_beforehand_is_refused(plain):
    """PAT-12: it would bypass the patch without a word."""
    plain.forward = plain.forward
    with pytest.raises(ValueError, match="forward was already replaced"):
        apply_liger_entropy(plain)


def test_liger_kernels_say_that_they_did_nothing_on_cpu(plain):
    with pytest.warns(UserWarning, match="CUDA"):
        apply_liger_entropy(plain, liger_kernels=True)
    assert is_fused(plain)


class Custom(nn.Module):
    """A user's own model: another head name, a bias, labels called targets, a tuple out of forward."""

    def __init__(self, name="lm_head", bias=True):
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        setattr(self, name, nn.Linear(8, 97, bias=bias))
        self.head_name = name

    def get_output_embeddings(self):
        return getattr(self, self.head_name)

    def forward(self, ids, targets=None):
        logits = getattr(self, self.head_name)(self.embed(ids)) / 0.7
        loss = None if targets is None else F.cross_entropy(logits.transpose(1, 2), targets)
        return logits, loss


@pytest.mark.parametrize("name", ["lm_head", "to_vocabulary"])
def test_own_module_works(name):
    torch.manual_seed(0)
    plain = Custom(name)
    model = apply_liger_entropy(copy.deepcopy(plain))
    losses = [m(IDS, LABELS)[1] for m in (plain, model)]
    assert_close(losses[1].detach(), losses[0].detach())
    assert model(IDS, targets=LABELS)[0] is None
    torch.autograd.backward(losses)
    for (n, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_close(b.grad, a.grad, n)
    assert torch.equal(model(IDS)[0], plain(IDS)[0])
