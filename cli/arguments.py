"""Parse the arguments of commands that do not train."""

import argparse
from typing import NoReturn

from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error


class ArgumentParser(argparse.ArgumentParser):
    """Report a mistake on the command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message to stderr, and exit with the code of a bad configuration."""
        print_error(f"{self.prog}: {message}")
        raise SystemExit(BAD_CONFIGURATION)
