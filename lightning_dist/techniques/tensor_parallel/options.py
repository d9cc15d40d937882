"""Define the options of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.techniques.options import Arguments, Build, Run, TechniqueOptions, argument
from lightning_dist.techniques.protocol import Technique
from lightning_dist.techniques.tensor_parallel.apply import TensorParallel
from lightning_dist.techniques.tensor_parallel.plan import PlanError, resolve_plan
from lightning_dist.techniques.tensor_parallel.planner import find_plan

__all__ = ["TensorParallelOptions"]


@dataclass(frozen=True)
class TensorParallelOptions(TechniqueOptions):
    """Choose how layers are split over ``tp``.

    Args:
        plan: Style of each module, by name: ``colwise``, ``packed_colwise:3`` (with the number of packed layers),
            ``rowwise``, ``colwise_gather_output``, ``attention_heads``, ``embedding_rowwise``, ``experts``,
            ``replicate`` or ``replicated_with_grad_allreduce``. In a name, ``*`` stands for one part between dots and
            ``**`` for one or more, and the first parts may be left out. None: ``tensor_parallel_plan()`` of the
            LightningModule, if it defines this method. A Hugging Face model's own plan is used for modules that are not
            named. For modules that neither names, the plan is inferred from a step; name a module with ``replicate`` to
            keep it whole.
        strict_plan: Whether to raise an error where no plan can be inferred, or where an inferred plan does not
            compute the same as the whole model. Otherwise, such modules are replicated. None: it is an error if nothing
            at all can be split, and a warning if it is less than 80% of the parameters. False: neither.
        sequence_parallel: Whether hidden states between split layers are split along the sequence; not supported
            together with stages. None: they are split where this does not change the results.
        loss_parallel: Whether logits stay split along the vocabulary, for ``F.cross_entropy``. None: they stay split
            unless a step needs whole logits.
        async_tensor_parallel: Whether layers exchange tokens while they multiply, with the kernels of
            ``torch.ops.symm_mem``. It needs CUDA devices of one node, and hidden states that are split along the
            sequence; it is not supported together with stages.
    """

    plan: Mapping[str, str] | None = argument(None, only_with="tp")
    strict_plan: bool | None = argument(None, only_with="tp")
    sequence_parallel: bool | None = argument(None, only_with="tp")
    loss_parallel: bool | None = argument(None, only_with="tp")
    async_tensor_parallel: bool = argument(False, only_with="tp")

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether layers are split, or experts are distributed, which ``plan`` names as well."""
        return max(layout.tp, layout.ep) > 1

    def check(self, run: Run, arguments: Arguments) -> None:
        """Refuse sequence parallelism between stages, and exchanges during products where torch has none."""
        layout = run.layout
        if self.sequence_parallel and layout.pp > 1 and layout.tp > 1:
            raise ValueError(
                f"sequence_parallel=True with pp_size={layout.pp}: stages send each other whole hidden states. Leave"
                " sequence_parallel out, or use pp_size=1."
            )
        if not self.async_tensor_parallel:
            return
        reasons = {
            "no layer is split. Set tp_size, or leave it out": layout.tp == 1,
            f"with pp_size={layout.pp}, stages send each other whole hidden states, so that layers exchange no tokens."
            " Leave it out": layout.pp > 1,
            f"its kernels copy between CUDA devices, and this run uses {run.device_type}. Leave it out": (
                run.device_type != "cuda"
            ),
            f"its kernels copy between the devices of a node, which has {run.num_devices}. Use a tp_size of at most"
            f" {run.num_devices}, or leave it out": layout.tp > run.num_devices,
        }
        for reason, is_given in reasons.items():
            if is_given:
                raise ValueError(f"async_tensor_parallel=True with tp_size={layout.tp}: {reason}.")

    def techniques(self, build: Build) -> Iterator[Technique]:
        """Find a plan, or take over the one of the module that this one is a copy of."""
        layout = build.layout
        if layout.tp == 1:
            if self.plan is not None:
                resolve_plan(build.module, self.plan)  # It raises if a name in the plan matches no module.
            return
        if layout.cp > 1 and self.plan is not None and "attention_heads" in self.plan.values():
            raise PlanError(
                f"plan: attention_heads with cp_size={layout.cp}: context parallelism splits the tokens of"
                " nn.MultiheadAttention, whose heads stay whole then. Use replicate for it."
            )
        mesh = layout.get_mesh(build.mesh, "tp")
        original = None if build.copied is None else build.copied.get(TensorParallel)
        plan = (
            find_plan(
                build.module,
                build.units,
                self.plan,
                build.steps.whole(),
                mesh,
                num_shards=layout.num_shards,
                is_strict=self.strict_plan,
                splits_sequence=False if layout.pp > 1 else self.sequence_parallel,
                splits_logits=self.loss_parallel,
                experts=build.claimed,
                splits_attention=layout.cp == 1,
            )
            if original is None
            else original.plan
        )
        yield TensorParallel(build.module, plan, mesh, layout.num_shards, self.async_tensor_parallel)
