"""Run the command as a module, for launchers that take one: ``torchrun -m lightning_dist.cli fit ...``."""

import sys

from lightning_dist.cli import main

sys.exit(main())
