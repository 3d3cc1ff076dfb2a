"""What the script of faults accepts as a run's numbers, without a federation."""

import numpy as np
import pytest
from chaos import SAME, Ended, compared

POINT = {"x": np.arange(3.0), "y": np.ones(2)}


def ended(losses=(4.0, 2.0, 1.0), absences=(0, 0, 0), point=POINT, status="finished", had_checkpoint=True):
    rounds = range(0, 150, 50)
    rows = [dict(rounds=r, loss=v, absences=a, drift=None) for r, v, a in zip(rounds, losses, absences, strict=False)]
    return Ended(rows, point, status, had_checkpoint, 1.0, "")


USUAL = ended()
LATE = dict(losses=(4.0, 2.0, 1.1), absences=(0, 0, 2))
FIRST = dict(losses=(4.1, 2.0, 1.1), absences=(1, 1, 1))
OTHER = {**POINT, "y": np.array([1.0, 1.5])}


@pytest.mark.parametrize("away", [False, True])
def test_the_same_bits_are_the_same(away):
    assert compared(ended(), USUAL, away) == SAME
    assert compared(ended(point=OTHER), USUAL, away) == "DIFFERENT: x and y"
    assert compared(ended(point={**POINT, "x": np.array([-0.0, 1.0, 2.0])}), USUAL, away) == "DIFFERENT: x and y"


def test_an_absence_excuses_only_what_comes_after_it_while_a_site_is_away():
    assert compared(ended(**LATE, point=OTHER), USUAL, True) == "the same until an absence, counted at round 100"
    assert compared(ended(**LATE), USUAL, False) == "DIFFERENT: metrics at round 100, with 2 absences"
    early = dict(losses=(4.0, 2.1, 1.1), absences=(0, 0, 2))
    assert compared(ended(**early), USUAL, True) == "DIFFERENT: metrics at round 50, with 0 absences"


@pytest.mark.parametrize("away", [False, True])
def test_an_absence_in_the_first_row_needs_a_fault_before_the_first_checkpoint(away):
    assert compared(ended(**FIRST, had_checkpoint=False), USUAL, away) == "the same until an absence, counted at round 0"
    assert compared(ended(**FIRST), USUAL, away) == "DIFFERENT: metrics at round 0, with 1 absences"


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        (dict(status="diverged"), "diverged, with 3 of 3 rows"),
        (dict(losses=(4.0, 2.0)), "finished, with 2 of 3 rows"),
        (dict(losses=(4.0, 2.0, float("nan"))), "metrics that are not finite, after an absence at round 100"),
        (dict(losses=(4.0, 2.0, None)), "metrics that are not finite, after an absence at round 100"),
        (dict(point={**POINT, "y": np.array([1.0, np.inf])}), "x and y that are not finite, after an absence at round 100"),
        (dict(point={"x": POINT["x"]}), "x and y that are not finite, after an absence at round 100"),
    ],
)
def test_after_an_absence_a_run_ends_with_finite_numbers(changed, verdict):
    assert compared(ended(**{**LATE, **changed}), USUAL, True) == f"DIFFERENT: {verdict}"
