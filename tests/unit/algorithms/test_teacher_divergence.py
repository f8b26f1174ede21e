"""The divergence over a teacher's likeliest tokens, against worked numbers and whole distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.algorithms.teacher_divergence import top_k_divergence


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


@pytest.mark.parametrize(
    ("student", "teacher", "expected"), [((0.5, 0.2), (0.6, 0.3), 0.231032), ((0.7, 0.29), (0.6, 0.3), 0.0)]
)
def test_worked_numbers(student: tuple[float, float], teacher: tuple[float, float], expected: float) -> None:
    assert top_k_divergence(log(*student), log(*teacher)).item() == pytest.approx(expected, abs=1e-6)


def test_too_much_mass_teaches_nothing_without_the_tail_and_something_with_it() -> None:
    gradients = []
    for with_tail in (False, True):
        student = log(0.7, 0.29).requires_grad_()
        top_k_divergence(student, log(0.6, 0.3), with_tail=with_tail).backward()
        gradients.append(student.grad)
    assert gradients[0].tolist() == [0, 0]
    assert gradients[1].min() > 0  # less of both


def test_with_the_tail_it_is_the_divergence_of_the_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(50, 9, generator=generator).log_softmax(dim=-1) for _ in range(2))
    top = teacher.topk(4, dim=-1).indices
    classes = []
    for one in (student, teacher):
        own = one.gather(-1, top).exp()
        classes.append(torch.cat([own, 1 - own.sum(dim=-1, keepdim=True)], dim=-1))
    expected = (classes[1] * (classes[1] / classes[0]).log()).sum(dim=-1)
    found = top_k_divergence(student.gather(-1, top), teacher.gather(-1, top), with_tail=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (found >= 0).all()


def test_over_all_tokens_it_is_the_kl_with_its_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(20, 7, generator=generator).log_softmax(dim=-1)
    gradients, values = [], []
    for divergence in (
        lambda student: top_k_divergence(student, teacher),
        lambda student: torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(dim=-1),
    ):
        logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
        value = divergence(logits.log_softmax(dim=-1))
        value.sum().backward()
        values.append(value.detach())
        gradients.append(logits.grad)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)


def test_below_the_floor_the_policy_has_no_gradient() -> None:
    student = log(0.6, 1e-9).requires_grad_()
    divergence = top_k_divergence(student, log(0.5, 0.4), floor=-10.0)
    assert divergence.item() == pytest.approx(0.5 * (log(0.5) - log(0.6)).item() + 0.4 * (log(0.4).item() + 10))
    divergence.backward()
    assert student.grad[1] == 0
    assert student.grad[0] < 0


def test_certainty_is_finite() -> None:
    student = log(1.0, 1e-30).requires_grad_()
    divergence = top_k_divergence(student, log(1.0, 1e-30), with_tail=True)
    divergence.backward()
    assert divergence.item() == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(student.grad).all()
