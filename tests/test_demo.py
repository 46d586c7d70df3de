"""The demo, run as a person runs it, for a few steps of a very small model."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from transformers import GPT2Config, GPT2LMHeadModel

from liger_entropy.demo.__main__ import main
from liger_entropy.demo.text import train_tokenizer

CONFIG = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def small(tmp_path):
    """Options for a run of a few seconds."""
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    config.write_text(json.dumps(CONFIG))
    text.write_text("The quick brown fox jumps over the lazy dog.\n\n" * 400)
    files = ["--model", str(config), "--text", str(text), "--out", str(tmp_path / "out")]
    return [*files, "--steps", "4", "--batch", "2", "--length", "32"]


def test_compare_gives_tables_picture_and_equal_curves(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "140")
    main([*small, "--compare", "--entropy-coef", "0.05"])
    printed = capsys.readouterr().out
    for words in ("held-out entropy", "unpatched: all logits", "patched: one chunk", "avoided"):
        assert words in printed
    differences = re.search(r"cross-entropy (\S+), entropy (\S+) nats", printed)
    assert all(float(difference) < 1e-4 for difference in differences.groups())
    picture = imread(tmp_path / "out" / "entropy.png")
    assert picture.shape[0] > 1000 and picture.std() > 0.05


def test_pretrained_folder_learns_from_a_folder_of_files(small, tmp_path, capsys):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts" / "deeper"
    texts.mkdir(parents=True)
    (texts / "one.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    (texts / "two.md").write_text("A lazy dog sleeps; the fox does not care.\n" * 100)
    (texts / "binary").write_bytes(b"\xff\xfe\xfd" * 100)
    train_tokenizer((texts / "one.txt").read_text(), 300).save(str(tmp_path / "model" / "tokenizer.json"))
    main([*small, "--model", str(tmp_path / "model"), "--text", str(texts.parent)])
    assert "32 x 300" in capsys.readouterr().out  # 2 sequences, cut to the model's 16 positions
    assert (tmp_path / "out" / "entropy.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "argument --steps: '0' is no integer of at least 1"),
        (["--entropy-coef", "much"], "argument --entropy-coef: invalid float value: 'much'"),
        (["--text", "/nowhere"], "argument --text: /nowhere does not exist"),
        (["--model", "/nowhere"], "--model is none of tiny, small, no config file and no model folder: /nowhere"),
        (["--text", "short.txt"], "fewer than"),
        (["--model", "list.json"], "is no Hugging Face model config"),
        (["--out", "list.json"], "argument --out: list.json is not a folder"),
    ],
)
def test_bad_options_are_named(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("Too short.\n")
    Path("list.json").write_text("[]")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert complaint in f"{stop.value} {capsys.readouterr().err}"
    assert stop.value.code != 0
