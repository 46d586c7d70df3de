"""Patched models that others have parallelised."""

from __future__ import annotations

import torch
from ranks import Ranks
from sharding import same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

try:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
except ImportError:  # transformers 4
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from liger_entropy.huggingface.patch import apply_liger_entropy

OPTIONS = dict(entropy_coef=0.1, label_smoothing=0.1, token_statistics=True)


def _model(vocab_size: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=12, intermediate_size=24, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=vocab_size,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def _batch(seed: int = 0) -> dict:
    ids = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return dict(input_ids=ids, labels=labels)


def _step(model) -> tuple[dict, dict]:
    outputs = model(**_batch())
    outputs.loss.backward()
    values = dict(loss=outputs.loss, entropy=outputs.entropy_loss, tokens=outputs.token_entropy)
    return {n: v.detach() for n, v in values.items()}, {n: _whole(p.grad) for n, p in model.named_parameters()}


def _whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _check(model) -> None:
    """A step of the parallel model against one of the same model in one process, nothing of it warned about."""
    values, gradients = _step(apply_liger_entropy(model, **OPTIONS))
    exact_values, exact = _step(apply_liger_entropy(_model(model.config.vocab_size), **OPTIONS))
    for name, value in values.items():
        same(name, value, exact_values[name])
    for name, gradient in gradients.items():
        same(f"gradient of {name}", gradient, exact[name])


def _mesh(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))


def head_of_parallelize_module_gives_a_local_softmax(ranks: Ranks):
    """Without gathering (as a DTensor, or as this rank's columns), and with; sequence parallel hidden states."""
    for style in (
        ColwiseParallel(use_local_output=False),
        ColwiseParallel(),
        ColwiseParallel(output_layouts=Replicate()),
    ):
        model = _model()
        parallelize_module(model, _mesh(ranks), {"lm_head": style})
        hooks = dict(model.lm_head._forward_hooks)
        _check(model)
        assert model.lm_head.weight.grad.placements == (Shard(0),)
        assert dict(model.lm_head._forward_hooks) == hooks


def _planned(model, plan: dict, mesh: DeviceMesh):
    """The model as from_pretrained(tp_plan=...) leaves it."""
    for name, module in model.named_modules():
        style = ALL_PARALLEL_STYLES[plan[key]] if (key := name.replace(".0.", ".*.")) in plan else None
        if style is not None:
            for parameter in dict(module.named_parameters(recurse=False)):
                _shard(style, module, parameter, mesh)
            (style.install_forward if hasattr(style, "install_forward") else style.prepare_module_tp)(module, mesh)
    return model


def _shard(style, module, name: str, mesh: DeviceMesh) -> None:
    if hasattr(style, "shard_param"):
        style.shard_param(module, name, mesh)
    else:  # transformers 4
        whole = getattr(module, name).data
        part = style.partition_tensor(whole, whole, name, whole.dtype, True, mesh.get_local_rank(), mesh)
        setattr(module, name, part)


# The plans that leave logits whole (by the name in transformers 5, or 4), and as this rank's columns.
_WHOLE = "colwise_gather_output" if "colwise_gather_output" in ALL_PARALLEL_STYLES else "colwise_rep"


def head_of_a_tp_plan_gives_a_local_softmax(ranks: Ranks):
    for style in (_WHOLE, "colwise"):
        model = _planned(_model(33), {"lm_head": style}, _mesh(ranks))
        before = model.lm_head.__dict__.get("forward"), dict(model.lm_head._forward_hooks)
        _check(model)
        assert (model.lm_head.__dict__.get("forward"), dict(model.lm_head._forward_hooks)) == before


def whole_tp_plan_gives_wrong_gradients(ranks: Ranks):
    model = _model(33)
    plan = model._tp_plan | {f"model.{name}": style for name, style in model.model._tp_plan.items()}
    _check(_planned(model, plan, _mesh(ranks)))


def generation_or_eval_of_a_parallel_head_changes(ranks: Ranks):
    model = _model()
    parallelize_module(model, _mesh(ranks), {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    expected = model(input_ids=_batch()["input_ids"]).logits
    apply_liger_entropy(model, **OPTIONS).eval()
    same("logits", model(**_batch()).logits, expected)


def head_that_fsdp_shards_on_its_own_is_read_in_pieces(ranks: Ranks):
    """Layers, head and root as units; two micro-batches, only the second of which is synchronised."""
    model = _model()
    mesh = _mesh(ranks)
    for unit in (*model.model.layers, model.lm_head, model):
        fully_shard(unit, mesh=mesh)
    apply_liger_entropy(model, **OPTIONS)
    reference = apply_liger_entropy(_model(), **OPTIONS)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(**_batch(step * ranks.size + ranks.rank)).loss.backward()
        for rank in range(ranks.size):
            (reference(**_batch(step * ranks.size + rank)).loss / ranks.size).backward()
    for (name, parameter), exact in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Llama's norm rounds to fp32, and the two divide by the number of ranks at different places.
        same(f"gradient of {name}", _whole(parameter.grad), exact.grad, rtol=1e-5, atol=1e-6)


def head_in_one_fsdp_unit_with_the_norm_loses_its_weight(ranks: Ranks):
    model, reference = _model(), _model()
    fully_shard([model.model.norm, model.lm_head], mesh=_mesh(ranks))
    fully_shard(model, mesh=_mesh(ranks))
    for patched in (apply_liger_entropy(model, **OPTIONS), apply_liger_entropy(reference, **OPTIONS)):
        optimizer = torch.optim.SGD(patched.parameters(), lr=0.1)
        for step in range(2):
            patched(**_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), exact in zip(model.named_parameters(), reference.parameters(), strict=True):
        same(name, parameter.full_tensor().detach(), exact.detach())
