"""``python -m liger_entropy.demo``: train a small language model on real text and look at its entropy."""
