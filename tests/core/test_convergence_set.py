"""The convergence classes and what is recorded of them, without training anything."""

import json
import re
from pathlib import Path

import pytest
import torch

from convergence.classes import CLASSES
from convergence.compare import FIELDS, widened
from convergence.data import VOCABULARY, training_batches
from convergence.models import build
from convergence.record import REFERENCES, digest, recorded
from convergence.table import table

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"


def test_class_lacks_its_reference_or_its_picture():
    for suffix in (".json", ".png"):
        assert {path.stem for path in REFERENCES.glob(f"*{suffix}")} == set(CLASSES), suffix


def test_references_come_from_several_environments():
    assert len({json.dumps(recorded(name)[0]) for name in CLASSES}) == 1


@pytest.mark.parametrize("name", CLASSES)
def test_reference_holds_a_member_outside_its_bounds(name):
    cls, content = CLASSES[name], json.loads((REFERENCES / f"{name}.json").read_text())
    assert set(content["members"]) == set(cls.members) - {"plain"}
    assert len(content["plain"]["loss"]) == cls.steps
    for member, found in content["members"].items():
        for field in FIELDS:
            bound = vars(cls.bounds[field])
            assert all(abs(found[field][kind]) <= bound[kind] for kind in bound), (member, field)


def test_page_of_the_references_is_out_of_date():
    assert (REFERENCES / "README.md").read_text() == table(REFERENCES)


def test_references_changed_without_a_reason_in_the_changelog():
    """The newest line about them names the references by their digest, which `convergence.record` prints."""
    lines = re.findall(r"^- Convergence references `(\w+)`: (\S.*)$", CHANGELOG.read_text(), flags=re.MULTILINE)
    assert lines and lines[0][0] == digest(), f"CHANGELOG.md needs: - Convergence references `{digest()}`: WHY."


@pytest.mark.parametrize("name, member, cached", [
    ("llama-fp32", "patched", False),
    ("llama-fp32", "patched, all cached", True),
    ("gpt2-bf16", "patched, all cached", True),
    ("every-option-fp32", "fused", False),
    ("every-option-fp32", "fused, all cached", True),
])  # fmt: skip
def test_member_does_not_cache_what_its_name_says(name, member, cached):
    """The logits of the kept tokens are the one matrix of that width that is saved for the backward."""
    cls = CLASSES[name]
    model = build(cls.model).to(torch.bfloat16 if cls.precision == "bf16" else torch.float32)
    objective, saved = cls.members[member].objective_of(model), []
    ids, labels = next(training_batches())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        objective(ids, labels)
    kept = (labels[:, 1:] != -100).sum()
    wide = [shape for shape in saved if len(shape) == 2 and shape[1] == VOCABULARY]
    assert wide == ([(kept, VOCABULARY)] if cached else [])


def test_bounds_for_a_gpu_lack_a_class_or_are_narrower():
    noise = json.loads((REFERENCES.parent / "noise_h200.json").read_text())
    assert set(noise) == {name for name in CLASSES if not name.endswith("kernels")}
    for name, of_fields in noise.items():
        bounds = CLASSES[name].bounds
        for field, wide in widened(bounds, of_fields, 3).items():
            assert wide.size == max(bounds[field].size, 3 * of_fields[field]["size"])
            assert wide.mean == max(bounds[field].mean, 3 * of_fields[field]["mean"])
            assert wide.early == bounds[field].early
