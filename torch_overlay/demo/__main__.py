"""Lets `python -m torch_overlay.demo` do the same as `python -m torch_overlay demo`."""

import sys

from torch_overlay.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
