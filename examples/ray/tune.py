"""Compare ways of training with Ray Tune (``python -m examples.ray.tune``).

Each trial is a run of ``lightning-dist launch --on ray`` with another strategy, which the trial's Ray cluster runs and
MLflow records. ``lightning-dist compare`` then shows the trials side by side.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import ray
from ray import tune

from lightning_dist.cli import main as lightning_dist

STRATEGIES = ("ddp", "data_parallel", "full_shard", "hybrid_shard")


def trial(config: dict[str, Any]) -> None:
    """Train with one strategy, and report its exit code and its time to Tune."""
    os.chdir(config["folder"])
    sys.path.insert(0, config["folder"])
    size = [f"--devices={config['devices']}", f"--logs={config['logs']}/{config['strategy']}"]
    accelerator = f"--accelerator={config['accelerator']}"
    command = ["fit", *config["words"], f"--trainer.strategy={config['strategy']}"]
    code = lightning_dist(["launch", "--on=ray", *size, accelerator, "--", *command])
    if code:
        raise RuntimeError(f"{config['strategy']} ended with exit code {code}: its output is in {config['logs']}")
    tune.report({"exit_code": code})


def main() -> None:
    """Run a trial for each strategy, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="devices of each trial")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    options, words = parser.parse_known_args()
    words = [word for word in words if word != "--"]
    folder = os.getcwd()
    num_cpus = 1 + (options.devices if options.accelerator == "cpu" else 0)
    ray.init(num_cpus=max(os.cpu_count() or 1, num_cpus), log_to_driver=False)
    common = {"folder": folder, "logs": os.path.join(folder, "launch", "tune"), "words": words}
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={
            **common,
            "devices": options.devices,
            "accelerator": options.accelerator,
            "strategy": tune.grid_search(options.strategies),
        },
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
    )
    results = tuner.fit()
    if results.errors:
        raise SystemExit(f"{results.num_errors} of {len(results)} trials failed: {results.errors[0]}")
    print("lightning-dist compare shows these runs side by side.")


if __name__ == "__main__":
    main()
