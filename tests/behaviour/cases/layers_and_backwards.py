"""Test direct child layers of the LightningModule, and backwards of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, VOCABULARY, Block, Classifier, LanguageModel, sgd, tokens


class _Sequences(LanguageModel):
    """Model language with one further layer before the head, which is a direct child of the LightningModule.

    Args:
        make: Function that makes the layer.
        use: Function that is called with the layer and its input, and returns its output.
        width: Number of features of the output.
    """

    def __init__(self, make: Callable[[], nn.Module], use: Callable[[Any, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.middle, self.use = make(), use
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.use(self.middle, self.norm(x)))


def _encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(NUM_FEATURES, 4, 32, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MIDDLES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], int]] = {
    "lstm": (lambda: nn.LSTM(NUM_FEATURES, 16, 2, batch_first=True), lambda layer, x: layer(x)[0], 16),
    "gru": (
        lambda: nn.GRU(NUM_FEATURES, 8, batch_first=True, bidirectional=True),
        lambda layer, x: layer(x)[0],
        16,
    ),
    "attention": (
        lambda: nn.MultiheadAttention(NUM_FEATURES, 4, batch_first=True),
        lambda layer, x: x + layer(x, x, x, need_weights=False)[0],
        16,
    ),
    "post_norm_encoder": (lambda: _encoder(False), lambda layer, x: layer(x), 16),
    "pre_norm_encoder": (lambda: _encoder(True), lambda layer, x: layer(x), 16),
    "convolution": (
        lambda: nn.Conv1d(NUM_FEATURES, 16, 3, padding=1),
        lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2),
        16,
    ),
}

for _name, _arguments in MIDDLES.items():

    @case(f"a direct child of the LightningModule: {_name.replace('_', ' ')}", name=f"direct_{_name}")
    def direct_child(run: Run, arguments: Any = _arguments) -> None:
        run.fit(_Sequences(*arguments), run.loader(tokens()))


@case("a tied language model without a module around its layers")
def direct_tied(run: Run) -> None:
    run.fit(LanguageModel(), run.loader(tokens()), accumulate_grad_batches=2, gradient_clip_val=0.5)


class _TiedByFunction(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.emb.weight)


@case("an embedding's weight used as a head, by a function")
def tied_by_function(run: Run) -> None:
    run.fit(_TiedByFunction(), run.loader(tokens()))


class _UsedEarlyAndLate(Classifier):
    """Use a layer's weight by functions before and after the layer is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(functional.linear(x, self.layer.weight)))
        return super().forward(functional.linear(torch.tanh(x), self.layer.weight.t()))


@case("a layer's weight used by functions before and after the layer")
def used_early_and_late(run: Run) -> None:
    run.fit(_UsedEarlyAndLate())


class _SplitHead(LanguageModel):
    """Penalise the weights that tensor parallelism splits along the vocabulary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("norm", self.emb.weight.detach().norm())
        return loss + 0.01 * self.emb.weight.pow(2).sum() + 0.01 * self.head.weight.abs().amax()


@case("a penalty on an embedding and a tied head")
def penalty_on_split_head(run: Run) -> None:
    run.fit(_SplitHead(), run.loader(tokens()))


class _GradientPenalty(Classifier):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        logits = self(x)
        value = functional.cross_entropy(logits, y, reduction="sum") if self.by == "loss" else logits.pow(2).sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        penalty = gradient.pow(2).sum(1).mean()
        self.log("penalty", penalty, sync_dist=True)
        return functional.cross_entropy(logits, y) + 0.1 * penalty


BACKWARD_IN_STEP = dict.fromkeys(("pp", "nd", "nd_tp"), r"The step calls torch\.autograd\.grad itself")


@case("a penalty on the gradient by the input (double backward)", refused=BACKWARD_IN_STEP)
def gradient_penalty(run: Run) -> None:
    run.fit(_GradientPenalty("logits"))


@case("a penalty on the gradient of the loss by the input (double backward)", refused=BACKWARD_IN_STEP)
def gradient_penalty_of_loss(run: Run) -> None:
    run.fit(_GradientPenalty("loss"))


class _LanguageModelPenalty(LanguageModel):
    """Run a double backward through logits that tensor parallelism splits along the vocabulary."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0]
        x = self.emb(ids[:, :-1])
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        loss = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / 16
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).sum(-1).mean()


@case("a double backward through a language model's logits", reference="ddp", refused=BACKWARD_IN_STEP)
def double_backward_of_logits(run: Run) -> None:
    run.fit(_LanguageModelPenalty(), run.loader(tokens()))


class _Adversarial(LanguageModel):
    """Perturb the embeddings by the sign of their gradient."""

    def rest(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0]
        x = self.emb(ids[:, :-1])
        loss = self.rest(x, ids)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + self.rest(x + 0.01 * gradient.sign(), ids)


@case("embeddings perturbed by the sign of their gradient", refused=BACKWARD_IN_STEP)
def adversarial_embeddings(run: Run) -> None:
    run.fit(_Adversarial(), run.loader(tokens()))


class _ByHand(Classifier):
    """Train by manual optimization with several backwards or optimizer steps in a step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        if self.kind == "two backwards":
            self.manual_backward(functional.cross_entropy(self(x), y))
            self.manual_backward(functional.cross_entropy(self(x * 0.5), y))
        elif self.kind == "two forwards first":
            losses = [functional.cross_entropy(self(x * scale), y) for scale in (1.0, 0.5)]
            for loss in losses:
                self.manual_backward(loss)
        elif self.kind == "one graph":
            logits = self(x)
            self.manual_backward(functional.cross_entropy(logits, y), retain_graph=True)
            self.manual_backward(logits.pow(2).mean())
        elif self.kind == "two steps":
            self.manual_backward(functional.cross_entropy(self(x), y))
            optimizer.step()
            optimizer.zero_grad()
            self.manual_backward(functional.cross_entropy(self(x), y))
        optimizer.step()


for _kind in ("two backwards", "two forwards first", "one graph", "two steps"):

    @case(f"manual optimization: {_kind}", name=f"by_hand_{_kind.replace(' ', '_')}")
    def by_hand(run: Run, kind: str = _kind) -> None:
        run.fit(_ByHand(kind))


class _SharpnessAware(Classifier):
    """Train by sharpness-aware minimisation: ascend, compute the gradient, return and descend (Foret et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        params = [param for param in self.parameters() if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm().item()
        with torch.no_grad():
            moves = [param.grad * (0.05 / norm) for param in params]
            for param, move in zip(params, moves, strict=True):
                param.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for param, move in zip(params, moves, strict=True):
                param.sub_(move)
        optimizer.step()


@case("sharpness-aware minimisation by hand", refused={"ep": "must have the same mesh"})
def sharpness_aware(run: Run) -> None:
    run.fit(_SharpnessAware())


class _Critic(Classifier):
    """Train a GAN with a gradient penalty (Gulrajani et al., 2017) by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), Block(), Block())
        self.critic = nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Tanh(), Block(), Block(), nn.Linear(16, 1)
        )
        del self.net, self.head

    def configure_optimizers(self) -> Any:
        return [sgd(self.generator.parameters()), sgd(self.critic.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator_step, critic_step = self.optimizers()
        real = batch[0]
        fake = self.generator(real.flip(1))
        mixed = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        critic_step.zero_grad()
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(real).mean() + penalty)
        critic_step.step()
        generator_step.zero_grad()
        self.manual_backward(-self.critic(self.generator(real.flip(1))).mean())
        generator_step.step()
        self.log("penalty", penalty, sync_dist=True)


@case(
    "a GAN with a gradient penalty, by hand",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), r"The step calls torch.autograd.grad\(create_graph=True\)"),
)
def gan_with_gradient_penalty(run: Run) -> None:
    run.fit(_Critic())


@case("Trainer(detect_anomaly=True)")
def detect_anomaly(run: Run) -> None:
    run.fit(Classifier(), detect_anomaly=True)


class _Finetuned(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@case("BackboneFinetuning")
def backbone_finetuning(run: Run) -> None:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, train_bn=False)
    run.fit(_Finetuned(), callbacks=[callback], max_epochs=3)


class _Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone[:3])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.backbone[3 - epoch], optimizer, lr=0.02)


@case("BaseFinetuning that unfreezes a block in each epoch")
def base_finetuning(run: Run) -> None:
    run.fit(_Finetuned(), callbacks=[_Unfreezing()], max_epochs=3)


class _Normed(Classifier):
    """Apply a weight norm to the first layer, to layers in the blocks, and to the head."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.net[0] = norm(self.net[0])
        for block in list(self.net.children())[1:5]:
            block.up, block.down = norm(block.up), norm(block.down)
        self.head = norm(nn.Linear(NUM_FEATURES, NUM_CLASSES))


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "parametrizations.spectral_norm": nn.utils.parametrizations.spectral_norm,
    "parametrizations.weight_norm": nn.utils.parametrizations.weight_norm,
    "parametrizations.orthogonal": nn.utils.parametrizations.orthogonal,
}

for _key, _norm in NORMS.items():

    @case(f"nn.utils.{_key}", name=f"layers_with_{_key.replace('.', '_')}")
    def normed(run: Run, norm: Any = _norm) -> None:
        run.fit(_Normed(norm), val=True)


class _NormedHead(LanguageModel):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.head = norm(nn.Linear(NUM_FEATURES, VOCABULARY, bias=False))


for _key in ("weight_norm", "parametrizations.spectral_norm"):

    @case(f"a language model's head with nn.utils.{_key}", name=f"head_with_{_key.replace('.', '_')}")
    def normed_head(run: Run, norm: Any = NORMS[_key]) -> None:
        run.fit(_NormedHead(norm), run.loader(tokens()))


class _Embedding(LanguageModel):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, NUM_FEATURES, **kwargs)
        self.head = nn.Linear(NUM_FEATURES, VOCABULARY)

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "sparse": {"sparse": True},
    "padding_idx": {"padding_idx": 3},
    "max_norm": {"max_norm": 1.0},
}

REFUSED_EMBEDDINGS = {
    "max_norm": {
        **dict.fromkeys(("full", "hybrid", "nd"), r"changed the parameter 'emb\.weight' in place, and not alike"),
        "data": r"The parameter 'emb\.weight' differs between ranks of dp_replicate",
    },
}

for _key, _kwargs in EMBEDDINGS.items():

    @case(f"nn.Embedding with {_key}", name=f"embedding_with_{_key}", refused=REFUSED_EMBEDDINGS.get(_key, {}))
    def embedding(run: Run, kwargs: dict[str, Any] = _kwargs) -> None:
        run.fit(_Embedding(**kwargs), run.loader(tokens()))


@case(
    "nn.Embedding with scale_grad_by_freq, which counts a rank's own samples",
    reference="ddp",
    differs=dict.fromkeys(("pp", "nd", "nd_tp"), "The samples of each microbatch are counted, as under accumulation."),
)
def embedding_with_scale_grad_by_freq(run: Run) -> None:
    run.fit(_Embedding(scale_grad_by_freq=True), run.loader(tokens()))


class _ViewBlock(Block):
    """Return a view from the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1).squeeze(1)


@case("blocks return views, which the step changes in place")
def views_changed_in_place(run: Run) -> None:
    class Adds(Classifier):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.blocks = nn.ModuleList(_ViewBlock() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x += 0.1
            return super().forward(x)

    run.fit(Adds())
