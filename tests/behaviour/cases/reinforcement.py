"""Test reinforcement learning on stored transitions: target networks, clipped ratios, entropies."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, samples

N, C = NUM_FEATURES, NUM_CLASSES


class _Replay(Dataset[dict[str, Tensor]]):
    """Return transitions as dictionaries."""

    def __init__(self) -> None:
        self.x, self.y = samples().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {
            "state": self.x[i],
            "action": self.y[i],
            "reward": self.x[i].sum() / 4,
            "next_state": self.x[i].roll(1),
            "done": self.x[i, 0] > 1,
            "log_prob": -1.4 + 0.1 * self.x[i, 1],
            "advantage": self.x[i, 2],
        }


def _body(out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(N, N), Block(), Block(), nn.Linear(N, out))


@case(
    "double DQN: a target network that takes the weights by load_state_dict every second step",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "changes the parameter .*change parameters in on_train_batch_start"),
)
def target_network(run: Run) -> None:
    class Dqn(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = _body(C)
            self.target_net = copy.deepcopy(self.net)
            for p in self.target_net.parameters():
                p.requires_grad = False

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            value = self.net(batch["state"]).gather(1, batch["action"].unsqueeze(-1)).squeeze(-1)
            with torch.no_grad():
                best = self.net(batch["next_state"]).argmax(1, keepdim=True)
                following = self.target_net(batch["next_state"]).gather(1, best).squeeze(1)
                following[batch["done"]] = 0.0
            loss = functional.smooth_l1_loss(value, batch["reward"] + 0.9 * following)
            if self.global_step % 2 == 0:
                self.target_net.load_state_dict(self.net.state_dict())
            self.log_dict({"loss": loss, "value": value.mean()}, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    run.fit(Dqn(), run.loader(_Replay()), max_epochs=2)


@case("PPO's clipped ratio, with a critic on the actor's body and an entropy of torch.distributions")
def clipped_ratio(run: Run) -> None:
    class Ppo(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.body = _body(N)
            self.actor, self.critic = nn.Linear(N, C), nn.Linear(N, 1)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            h = self.body(batch["state"])
            policy = torch.distributions.Categorical(logits=self.actor(h))
            ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            actor = -torch.min(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
            critic = functional.mse_loss(self.critic(h).squeeze(-1), batch["reward"])
            entropy = policy.entropy().mean()
            self.log("clip fraction", ((ratio - 1).abs() > 0.2).double().mean(), sync_dist=True)
            self.log("kl", (batch["log_prob"] - policy.log_prob(batch["action"])).mean().item(), sync_dist=True)
            return actor + 0.5 * critic - 0.01 * entropy

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(
                [
                    {"params": self.body.parameters(), "lr": 5e-3},
                    {"params": [*self.actor.parameters(), *self.critic.parameters()], "lr": 1e-2},
                ]
            )

    run.fit(Ppo(), run.loader(_Replay()), max_epochs=2, gradient_clip_val=0.5)


@case("an actor, two critics, a learned temperature, and targets that follow by Polyak")
def soft_actor_critic(run: Run) -> None:
    class Sac(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(1)
            self.actor = _body(C)
            self.critics = nn.ModuleList(_body(C) for _ in range(2))
            self.targets = copy.deepcopy(self.critics).requires_grad_(False)
            self.log_alpha = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            actor_optimizer, critic_optimizer, alpha_optimizer = self.optimizers()
            alpha = self.log_alpha.exp().detach()
            with torch.no_grad():
                log_p = self.actor(batch["next_state"]).log_softmax(-1)
                following = torch.min(*[target(batch["next_state"]) for target in self.targets])
                value = (log_p.exp() * (following - alpha * log_p)).sum(-1)
                wanted = batch["reward"] + 0.9 * (~batch["done"]) * value
            loss = sum(
                functional.mse_loss(c(batch["state"]).gather(1, batch["action"][:, None])[:, 0], wanted)
                for c in self.critics
            )
            critic_optimizer.zero_grad()
            self.manual_backward(loss)
            critic_optimizer.step()
            log_p = self.actor(batch["state"]).log_softmax(-1)
            with torch.no_grad():
                q = torch.min(*[critic(batch["state"]) for critic in self.critics])
            actor_loss = (log_p.exp() * (alpha * log_p - q)).sum(-1).mean()
            actor_optimizer.zero_grad()
            self.manual_backward(actor_loss)
            actor_optimizer.step()
            entropy = -(log_p.exp() * log_p).sum(-1).mean().detach()
            alpha_loss = (self.log_alpha * (entropy - 1.0)).mean()
            alpha_optimizer.zero_grad()
            self.manual_backward(alpha_loss)
            alpha_optimizer.step()
            for p, target in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                target.data.mul_(0.9).add_(p.data, alpha=0.1)
            self.log_dict({"critic": loss, "actor": actor_loss, "alpha": alpha}, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return (
                torch.optim.Adam(self.actor.parameters(), lr=3e-3),
                torch.optim.Adam(self.critics.parameters(), lr=3e-3),
                torch.optim.Adam([self.log_alpha], lr=1e-2),
            )

    run.fit(Sac(), run.loader(_Replay()), max_epochs=2)
