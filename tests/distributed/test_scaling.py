"""benchmarks/scaling.py: the model's arithmetic, and its place for measured values."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


@pytest.fixture(scope="module")
def scaling():
    return runpy.run_path(str(SCRIPT))


def test_one_gpu_does_not_take_what_was_measured(scaling):
    (step,) = scaling["choices"](scaling["Machine"](), 8192, 4096, 128256, 1)
    assert step.step_ms == pytest.approx(54.4, rel=0.01)


def test_scheme_does_not_change_at_half_a_vocabulary_of_tokens(scaling):
    m = scaling["Machine"](latency=0.0)
    for tokens, scheme in ((15000, "tp"), (17000, "sequence")):
        assert scaling["best"](m, scaling["choices"](m, tokens, 4096, 32000, 2)).scheme == scheme


def test_what_is_sent_between_nodes_goes_at_the_links_rate(scaling):
    m = scaling["Machine"](link=100.0, network=10.0, latency=0.0)
    assert m.send_ms(1e9, 8, 8) == pytest.approx(10.0)
    assert m.send_ms(1e9, 16, 8) == pytest.approx(12.5)  # eight ports
    assert m.send_ms(1e9, 2, 1) == pytest.approx(100.0)


def test_measured_step_is_not_beside_its_prediction(scaling, tmp_path, capsys, monkeypatch):
    table = tmp_path / "measured.csv"
    table.write_text(
        "device,ranks,scheme,tokens,hidden,vocab,step_ms\nGPU,2,tp,8192,4096,32000,7.77\ncpu,2,tp,8192,4096,32000,9999\n"
    )
    arguments = f"scaling.py --tokens 8192 --vocab 32000 --gpus 2 --measured {table} --csv {tmp_path / 'out.csv'}"
    monkeypatch.setattr("sys.argv", arguments.split())
    scaling["main"]()
    printed = capsys.readouterr().out
    assert "7.24 [7.77]" in printed and "9999" not in printed
    assert "8192,4096,32000,2,2" in (tmp_path / "out.csv").read_text()
