"""Report on a finished run with a sample of text, and compare its loss with two baselines."""

from typing import cast

import torch
from lightning.pytorch import Callback, Trainer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from examples.gpt.data import TextDataModule
from examples.gpt.model import GPTModule
from lightning_dist import full_parameters

MAX_WIDTH = 96  # The report has at most this number of columns.


class TextReport(Callback):
    """Print a report on rank 0 when fitting ends.

    Args:
        prompt: Text to continue.
        num_tokens: Number of bytes to add to the prompt.
        temperature: Number by which the logits are divided; below 1, likely bytes become likelier.
        top_k: Number of likeliest bytes to draw from; None means all bytes.
        seed: Seed of the random number generator for the sample.
    """

    def __init__(
        self,
        prompt: str = "def ",
        num_tokens: int = 300,
        temperature: float = 0.6,
        top_k: int | None = 40,
        seed: int = 0,
    ) -> None:
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.seed = seed
        self._sample = ""

    def on_train_end(self, trainer: Trainer, pl_module: GPTModule) -> None:
        """Draw the sample on rank 0 while the weights are still available. All ranks take part in gathering them."""
        with full_parameters(pl_module):
            if trainer.is_global_zero:
                self._sample = self._draw(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: GPTModule) -> None:
        """Print the report below the output of training."""
        if not trainer.is_global_zero:
            return
        console = Console(highlight=False)
        title, width = escape(f"sample after {self.prompt!r}"), min(console.width, MAX_WIDTH)
        with console.capture() as capture:
            console.print(Panel(escape(self._sample), title=title, title_align="left", width=width))
            console.print(_losses(trainer))
        print(capture.get())  # With sys.stdout, a progress bar that is still shown does not mix with the report.

    def _draw(self, pl_module: GPTModule) -> str:
        device = pl_module.device
        prompt = torch.tensor([list(self.prompt.encode())], device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
        text = pl_module.generate(prompt, self.num_tokens, self.temperature, self.top_k, generator)
        return bytes(text[0].tolist()).decode(errors="replace")


def _losses(trainer: Trainer) -> Table:
    data = cast(TextDataModule, trainer.datamodule)
    table = Table("nats per byte", "loss")
    if (loss := trainer.callback_metrics.get("val/loss")) is not None:
        table.add_row("this model, held-out text", f"{float(loss):.3f}", style="bold")
    table.add_row("byte frequencies (unigram), held-out text", f"{data.unigram_loss:.3f}")
    table.add_row("uniform guess, ln 256", f"{data.uniform_loss:.3f}")
    return table
