"""Where PyTorch's own tests are meant to end otherwise under the overlay; `tools/run_pytorch_tests.py` reads it.

Each entry has a pattern on ``file::Class::test``, a reason, and the torch releases that it is for. An entry that no
longer holds fails the run, so that this list says what is, not what was.
"""

from pytorch_tests.difference import Expected

EXPECTED: list[Expected] = []
