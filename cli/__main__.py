"""``python -m lightning_dist.cli``, for launchers that take a module: ``torchrun -m lightning_dist.cli fit ...``."""

import sys

from lightning_dist.cli import main

sys.exit(main())
