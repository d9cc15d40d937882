"""Provide experiment loggers."""

from lightning_dist.plugins.loggers.mlflow import MLflowLogger

__all__ = ["MLflowLogger"]
