"""Every way to write a strategy, in flags and files, gives the same configuration."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_dist.cli import main

HYBRID = "lightning_dist.HybridShardStrategy"
FULL = "lightning_dist.FullShardStrategy"
DDP = "lightning.pytorch.strategies.DDPStrategy"
FLAG = "--trainer.strategy"


def parse(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    model = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
    monkeypatch.setattr(sys, "argv", ["lightning-dist", "fit", model, *arguments, "--print_config"])
    assert main() == 0
    config: dict[str, Any] = yaml.safe_load(capfd.readouterr().out)
    return config


def summary(strategy: Any, names: tuple[str, ...]) -> Any:
    """Return a strategy's name, or its class with those of its arguments that are in ``names``."""
    if isinstance(strategy, str):
        return strategy
    return strategy["class_path"], {name: value for name, value in strategy["init_args"].items() if name in names}


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        (None, [f"{FLAG}=hybrid_shard"], (HYBRID, {"dp_replicate_size": None, "dp_shard_size": None})),
        (None, [f"{FLAG}=Hybrid_Shard"], (HYBRID, {"dp_replicate_size": None, "dp_shard_size": None})),
        (None, [f"{FLAG}=HybridShardStrategy"], (HYBRID, {"dp_replicate_size": None, "dp_shard_size": None})),
        (None, [f"{FLAG}=full_shard", f"{FLAG}.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        (None, [f"{FLAG}=full_shard", f"{FLAG}.init_args.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        (None, [f"{FLAG}=FullShardStrategy", f"{FLAG}.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        (None, [f"{FLAG}={FULL}", f"{FLAG}.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        (
            None,
            [f"{FLAG}=lightning_dist.plugins.strategies.FullShardStrategy", f"{FLAG}.dp_shard_size=2"],
            (FULL, {"dp_shard_size": 2}),
        ),
        (None, [f"{FLAG}.class_path=full_shard", f"{FLAG}.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        (
            None,
            [FLAG + '={"class_path": "full_shard", "init_args": {"dp_shard_size": 2}}'],
            (FULL, {"dp_shard_size": 2}),
        ),
        ("full_shard", [], (FULL, {"dp_shard_size": None})),
        ("full_shard", [f"{FLAG}.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        ("FullShardStrategy", [f"{FLAG}.dp_shard_size=2"], (FULL, {"dp_shard_size": 2})),
        ("{class_path: full_shard}", [], (FULL, {"dp_shard_size": None})),
        ("{class_path: full_shard, init_args: {dp_shard_size: 2}}", [], (FULL, {"dp_shard_size": 2})),
        ("{class_path: FullShardStrategy, init_args: {dp_shard_size: 2}}", [], (FULL, {"dp_shard_size": 2})),
        (f"{{class_path: {FULL}, init_args: {{dp_shard_size: 2}}}}", [], (FULL, {"dp_shard_size": 2})),
        (
            "{class_path: hybrid_shard, init_args: {dp_shard_size: 2}}",
            [f"{FLAG}.dp_replicate_size=-1"],
            (HYBRID, {"dp_shard_size": 2, "dp_replicate_size": -1}),
        ),
        (
            "{class_path: hybrid_shard, init_args: {dp_shard_size: 2}}",
            [f"{FLAG}.dp_shard_size=4"],
            (HYBRID, {"dp_shard_size": 4, "dp_replicate_size": None}),
        ),
        ("{class_path: hybrid_shard, init_args: {dp_replicate_size: 2}}", [f"{FLAG}=ddp"], "ddp"),
        ("ddp", [f"{FLAG}=full_shard"], (FULL, {"dp_shard_size": None})),
        (
            "{class_path: hybrid_shard, init_args: {dp_shard_size: 2}}",
            [f"{FLAG}=full_shard"],
            (FULL, {"dp_shard_size": None}),
        ),
        (
            "{class_path: hybrid_shard, init_args: {dp_shard_size: 2}}",
            [FLAG + '={"class_path": "full_shard", "init_args": {"dp_shard_size": 4}}'],
            (FULL, {"dp_shard_size": 4}),
        ),
        (None, [], "auto"),
        (None, [f"{FLAG}=auto"], "auto"),
        (None, [f"{FLAG}=ddp"], "ddp"),
        (None, [f"{FLAG}=ddp_notebook"], "ddp_notebook"),
        (None, [f"{FLAG}=fsdp"], "fsdp"),
        (
            None,
            [f"{FLAG}=ddp", f"{FLAG}.static_graph=true"],
            (DDP, {"static_graph": True, "find_unused_parameters": False}),
        ),
        (
            "ddp_find_unused_parameters_true",
            [f"{FLAG}.static_graph=true"],
            (DDP, {"static_graph": True, "find_unused_parameters": True}),
        ),
    ],
)
def test_every_spelling_of_a_strategy_gives_its_class_and_arguments(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str | None,
    flags: list[str],
    expected: Any,
) -> None:
    arguments = list(flags)
    if file is not None:
        path = tmp_path / "x.yaml"
        path.write_text(f"trainer:\n  strategy: {file}\n")
        arguments = ["-c", str(path), *flags]
    strategy = parse(monkeypatch, capfd, *arguments)["trainer"]["strategy"]
    names = ("dp_replicate_size", "dp_shard_size", "static_graph", "find_unused_parameters")
    assert summary(strategy, names) == expected


def test_later_files_and_flags_override_earlier_ones_before_interpolation(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layers = {
        "base.yaml": "trainer: {max_steps: 10, devices: 2, log_every_n_steps: '${trainer.max_steps}'}",
        "overlay.yaml": "trainer: {max_steps: 20, strategy: {class_path: full_shard, "
        "init_args: {dp_shard_size: '${trainer.devices}'}}}",
    }
    flags = []
    for name, text in layers.items():
        (tmp_path / name).write_text(text)
        flags += ["-c", str(tmp_path / name)]
    trainer = parse(monkeypatch, capfd, *flags, "--trainer.devices=4")["trainer"]
    assert (trainer["max_steps"], int(trainer["devices"]), trainer["log_every_n_steps"]) == (20, 4, 20)
    assert trainer["strategy"]["init_args"]["dp_shard_size"] == 4


COMPRESSION = "lightning_dist.techniques.compression"


@pytest.mark.parametrize(
    ("file", "flags", "name", "expected"),
    [
        ("{compression: powersgd}", [], "compression", "powersgd"),
        (None, [f"{FLAG}.compression=topk"], "compression", "topk"),
        (
            f"{{compression: {{class_path: {COMPRESSION}.PowerSGD, init_args: {{rank: 8, exclude: [embedding]}}}}}}",
            [f"{FLAG}.compression.start_step=100"],
            "compression",
            (f"{COMPRESSION}.PowerSGD", {"rank": 8, "start_step": 100, "exclude": ["embedding"]}),
        ),
        (
            None,
            [f"{FLAG}.compression=PowerSGD", f"{FLAG}.compression.rank=2"],
            "compression",
            (f"{COMPRESSION}.PowerSGD", {"rank": 2, "start_step": 0, "exclude": []}),
        ),
        (
            f"{{sync: {{class_path: {COMPRESSION}.DiLoCo, init_args: {{compression: int8}}}}}}",
            [f"{FLAG}.sync.inner_steps=20"],
            "sync",
            (f"{COMPRESSION}.DiLoCo", {"inner_steps": 20, "compression": "int8", "start_step": 0}),
        ),
        (None, [f"{FLAG}.sync=localsgd"], "sync", "localsgd"),
        (
            None,
            [f"{FLAG}.sync=LocalSGD", f"{FLAG}.sync.inner_steps=20"],
            "sync",
            (f"{COMPRESSION}.LocalSGD", {"inner_steps": 20, "start_step": 0}),
        ),
    ],
)
def test_compression_is_chosen_by_name_or_by_class_and_arguments(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str | None,
    flags: list[str],
    name: str,
    expected: Any,
) -> None:
    arguments = [f"{FLAG}=hybrid_shard", *flags]
    if file is not None:
        path = tmp_path / "x.yaml"
        path.write_text(f"trainer:\n  strategy:\n    class_path: hybrid_shard\n    init_args: {file}\n")
        arguments = ["-c", str(path), *flags]
    chosen = parse(monkeypatch, capfd, *arguments)["trainer"]["strategy"]["init_args"][name]
    assert summary(chosen, ("rank", "start_step", "exclude", "inner_steps", "compression")) == expected
