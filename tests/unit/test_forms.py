"""Test that the forms of a parameter stay alike, whichever of them a step changes."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dist.parameters.forms import SameRequiresGrad, put_into_memory


def test_requires_grad_follows_whichever_form_was_set() -> None:
    form, parameter = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    same = SameRequiresGrad()
    same.take_from(form, parameter)
    assert not parameter.requires_grad  # Nothing was common yet, so that the form does not count as set.
    same.copy_to(form, parameter)
    assert not form.requires_grad
    form.requires_grad_(True)
    same.take_from(form, parameter)
    assert parameter.requires_grad
    parameter.requires_grad_(False)
    same.copy_to(form, parameter)
    assert not form.requires_grad


def test_the_parameter_wins_if_both_forms_were_set() -> None:
    form, parameter, same = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), SameRequiresGrad()
    same.copy_to(form, parameter)
    form.requires_grad_(False)
    parameter.requires_grad_(False)
    same.copy_to(form, parameter)
    assert not form.requires_grad
    assert not parameter.requires_grad


def test_assigned_data_are_written_into_the_memory_without_a_new_version() -> None:
    memory = torch.zeros(3)
    form = nn.Parameter(memory.detach())
    assert not put_into_memory(form, memory)
    form.data = torch.ones(3)
    version = memory._version
    with torch.inference_mode():
        assert put_into_memory(form, memory)
    assert memory.tolist() == [1.0, 1.0, 1.0]
    assert form.data_ptr() == memory.data_ptr()
    assert memory._version == version
    assert not form.is_inference()
