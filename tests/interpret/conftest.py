import os

# Triton reads the variable when it is imported, so these tests need a process of their own: `make test-interpret`.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
