"""Plans are merged from the user, the module and Hugging Face, and wrong plans are refused."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.techniques.tensor_parallel import PlanError, resolve_plan
from lightning_dist.techniques.tensor_parallel.plan import Entry
from lightning_dist.techniques.tensor_parallel.ties import with_tied
from tests.models import build


class WithPlan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"up": "colwise", "down": "rowwise"}


def styles(root: nn.Module, user: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Resolve the plan of ``root``, and return the style and the source of each entry."""
    return {name: (entry.style, entry.source) for name, entry in resolve_plan(root, user).items()}


def test_patterns_may_have_wildcards_and_leave_out_the_beginning_of_names() -> None:
    assert styles(build("gpt"), {"blocks.*.mlp.0": "colwise", "model.**.out": "rowwise"}) == {
        f"model.blocks.{i}.{name}": (style, "user")
        for i in range(2)
        for name, style in (("out", "rowwise"), ("mlp.0", "colwise"))
    }


def test_a_module_may_have_its_own_plan_which_the_user_overrides() -> None:
    assert styles(WithPlan()) == {"up": ("colwise", "user"), "down": ("rowwise", "user")}
    assert styles(WithPlan(), {"up": "replicate"}) == {"up": ("replicate", "user")}


def test_hugging_faces_plan_is_used_for_modules_that_the_user_does_not_name() -> None:
    plan = styles(build("llama"), {"q_proj": "replicate"})
    layer = "model.model.layers.0"
    assert plan[f"{layer}.self_attn.q_proj"] == ("replicate", "user")
    assert plan[f"{layer}.self_attn.o_proj"] == ("rowwise", "Hugging Face")
    assert plan["model.lm_head"] == ("colwise_gather_output", "Hugging Face")
    assert plan["model.model.embed_tokens"] == ("embedding_rowwise", "Hugging Face")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.mpl.0": "colwise"}, r"'blocks.\*.mpl.0' matches no module. Did you mean .*model.blocks.\*.mlp.0"),
        ({"blocks.0.out": "rowwise", "blocks.*.out": "rowwise"}, r"'blocks.0.out' and 'blocks.\*.out' both match"),
        ({"blocks.*.out": "rowise"}, r"'blocks.\*.out' has the unknown style 'rowise'. Did you mean 'rowwise'\?"),
        ({"blocks.*.out": "diagonal"}, "unknown style 'diagonal'. There are colwise, packed_colwise, "),
    ],
)
def test_a_wrong_plan_is_refused_with_a_suggestion(plan: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_plan(build("gpt"), plan)


class TiedBias(nn.Module):
    """Tie parameters as BERT does: the head's weight to the embedding, its bias to a parameter of the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.around = nn.Module()
        self.around.head = nn.Linear(4, 8)
        self.around.head.weight = self.embedding.weight
        self.around.bias = self.around.head.bias


def test_layers_tied_to_a_module_that_cannot_be_split_are_replicated() -> None:
    split = {"embedding": Entry("embedding_rowwise", "inferred"), "around.head": Entry("colwise", "inferred")}
    found = with_tied(TiedBias(), split)
    assert {name: entry.is_split for name, entry in found.items()} == {"embedding": False, "around.head": False}
    assert "tied to around" in found["around.head"].why
    with pytest.raises(PlanError, match=r"around is tied to around\.head"):
        with_tied(TiedBias(), {"around.head": Entry("colwise", "user")})


def test_a_tied_parameter_of_a_module_that_does_not_read_it_does_not_prevent_the_split() -> None:
    split = {"embedding": Entry("embedding_rowwise", "inferred"), "around.head": Entry("colwise", "inferred")}
    readers = {"embedding.weight": {"embedding", "around.head"}, "around.bias": {"around.head"}}
    assert with_tied(TiedBias(), split, readers) == split
    readers["around.bias"].add("around")
    assert not any(entry.is_split for entry in with_tied(TiedBias(), split, readers).values())


def test_what_the_user_replicates_is_replicated_with_everything_that_is_tied_to_it() -> None:
    split = {"embedding": Entry("embedding_rowwise", "Hugging Face"), "around.head": Entry("replicate", "user")}
    found = with_tied(TiedBias(), split)
    assert {name: entry.is_split for name, entry in found.items()} == {"embedding": False, "around.head": False}
    assert found["embedding"].why == "tied to around.head, which plan replicates"
    with pytest.raises(PlanError, match=r"around\.head is replicate, and embedding, .* is split as embedding_rowwise"):
        with_tied(TiedBias(), {**split, "embedding": Entry("embedding_rowwise", "user")})
