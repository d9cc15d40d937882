"""Test steps and blocks with loops that end when a tensor has a certain value, and the generation of text."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, VOCABULARY, Block, Classifier, LanguageModel, Network, tokens


@case("a validation step that loops until a tensor is small")
def loop_between_parts(run: Run) -> None:
    class Halves(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            largest = self(batch[0]).abs().max()
            while not bool(largest < 1e-3):
                largest = largest * 0.5
            assert largest > 0
            super().validation_step(batch, batch_idx)

    run.fit(Halves(), val=True)


class _Converges(nn.Module):
    """Iterate to a fixed point of a contraction, as deep equilibrium models do, and differentiate the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(NUM_FEATURES)
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            while True:
                new = torch.tanh(0.1 * self.layer(z) + self.norm(x))
                has_converged = (new - z).abs().max() < 1e-12
                z = new
                if has_converged:
                    break
        return x + torch.tanh(0.1 * self.layer(z) + self.norm(x))


@case("blocks that iterate until they converge")
def loop_in_blocks(run: Run) -> None:
    run.fit(Network(lambda: nn.Sequential(*(_Converges() for _ in range(2)), nn.Linear(NUM_FEATURES, 4))), val=True)


class _Generates(LanguageModel):
    """Generate by hand until every sequence is long enough, which a tensor says."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = batch[0][:, :3]
        num_tokens = torch.full((len(ids),), 3)
        while not bool((num_tokens >= 7).all()):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
            num_tokens = num_tokens + 1
        self.log("val/length", float(ids.shape[1]), sync_dist=True)
        self.log("val/ids", ids.double().mean(), sync_dist=True)


@case("a validation that generates text by hand until each sequence of the batch is long enough")
def generation_by_hand(run: Run) -> None:
    model = _Generates()
    run.fit(model, run.loader(tokens()), val=run.loader(tokens(8)), limit_val_batches=1)


class _Pretrained(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(1)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0]).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = self.model.generate(batch[0][:, :4], max_new_tokens=4, do_sample=False)
        self.log("val/ids", ids.double().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@case("a validation that calls Hugging Face's generate")
def generate(run: Run) -> None:
    run.fit(_Pretrained(), run.loader(tokens()), val=run.loader(tokens(16)))


@case("a validation alone that calls Hugging Face's generate, of a model that was not trained here")
def validation_alone(run: Run) -> None:
    run.record("validated", run.trainer().validate(_Pretrained(), run.loader(tokens(16)), verbose=False))


@case(
    "a training step that calls the model until it is confident",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "in a loop whose end the value of a tensor decides"),
)
def loop_in_training(run: Run) -> None:
    class Refines(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(Block() for _ in range(2)))

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            num = 0
            while True:
                x, num = self.net(x), num + 1
                logits = self.head(x)
                if bool(logits.softmax(-1).max() > 2) or num == 64:
                    break
            return functional.cross_entropy(logits, y)

    run.fit(Refines(), max_steps=1)
