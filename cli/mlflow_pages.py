"""Link to pages of MLflow's web interface."""

import json
from collections.abc import Iterable
from urllib.parse import quote

from lightning_dist.run import runs_table


def run_page(experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page, relative to that of the server.

    MLflow 3.17 opens an experiment on an overview for language models unless the address says otherwise.
    """
    return f"#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def runs_page(experiment_id: str) -> str:
    """Return the address of an experiment's table of runs, which shows how each was trained and how well it went."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={runs_table.VIEW}&workflowType=machine_learning"


def comparison_page(experiment_ids: Iterable[str], run_ids: Iterable[str]) -> str:
    """Return the address of the page that compares runs, relative to that of the server."""
    runs, experiments = (
        quote(json.dumps(list(ids), separators=(",", ":")), safe="") for ids in (run_ids, experiment_ids)
    )
    return f"#/compare-runs?runs={runs}&experiments={experiments}"


def how_to_open(tracking_uri: str, page: str, table: str = "") -> str:
    """Return text that says where pages are, and which server must run for them if the store is not a server.

    Args:
        tracking_uri: URI of the store.
        page: Address of the page, relative to that of the server.
        table: Address of the table of all runs, relative to that of the server; empty: it is left out.
    """
    is_server = tracking_uri.startswith("http")
    address = tracking_uri.rstrip("/") if is_server else "http://127.0.0.1:5000"
    after = "" if is_server else f"\n  after: mlflow server --backend-store-uri {tracking_uri}"
    others = f"\n  all runs: {address}/{table}" if table else ""
    return f"MLflow: {address}/{page}{others}{after}"
