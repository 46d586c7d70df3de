"""Training with and without liger_entropy, in equivalence classes of trajectories.

A class is one model, one precision, one objective. Its members train it in different ways on the same batches from the
same weights; they must share the trajectory of the plain member within the class's bounds (``compare.py``).

``make test-convergence`` checks every class. ``python -m convergence.record`` writes ``references/``: each plain
trajectory with its environment, how far every member was from it, and a plot. A recorded trajectory is one more member
of its class, so a reference that changes is a change in training and needs a reason in the changelog.
"""
