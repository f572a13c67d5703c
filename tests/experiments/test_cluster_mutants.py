"""Mutants of clusters' plans, as the experiment has them."""

from experiments.cluster_mutants import EXPERIMENT


def test_the_experiment(tmp_path, capsys):
    EXPERIMENT.run("--count", "20", "--json", str(tmp_path / "rows.jsonl"))
    out = capsys.readouterr().out
    assert "Mutants of clusters' plans" in out
    assert out.splitlines()[-1].split()[-1] == "0"
