"""Parse the arguments of commands without a Trainer."""

import argparse
from typing import NoReturn

from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error


class OneLineParser(argparse.ArgumentParser):
    """Report a mistake on the command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and exit."""
        print_error(f"{self.prog}: {message}")
        raise SystemExit(BAD_CONFIGURATION)
