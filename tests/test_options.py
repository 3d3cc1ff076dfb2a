"""`RunOptions`: one checked value, with one clear line for whatever cannot be used."""

import dataclasses

import numpy as np
import pytest
from test_reproductions import table_plan

from fedbilevel.core.participation import Bernoulli, Dropouts, Everyone, Uniform
from fedbilevel.errors import InputError
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give either a budget of rounds or a number of steps"),
        (dict(rounds=3, steps=3), "give either a budget of rounds or a number of steps"),
        (dict(rounds="3"), "rounds must be a whole number of at least 1 .*; given: '3'"),
        (dict(rounds=True), "rounds must be a whole number of at least 1 .*; given: True"),
        (dict(rounds=3, seed=2**32), "seed must be a whole number of at least 0 .and below 2³².; given: 4294967296"),
        (dict(rounds=3, dropout=1.0), "dropout must be a number of at least 0 and below 1; given: 1.0"),
        (dict(rounds=3, bernoulli=0.5, clients_per_round=2), "either clients per round or a probability to take part"),
        (dict(rounds=3, products="float8"), "products must be one of default, float32, bfloat16; given: float8"),
        (dict(rounds=3, loss_bound=float("inf")), "loss_bound must be a number above 0; given: inf"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        RunOptions(**values)
    assert "\n" not in str(caught.value)


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(InputError, match="mine has no setting 'clients_per_rond'; did you mean clients_per_round"):
        RunOptions.read("mine", {"rounds": 3, "clients_per_rond": 2})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (dict(clients_per_rond=2), "i.i.d., SimFBO: run has no setting 'clients_per_rond'; did you mean clients_per_round"),
        (dict(clients_per_round="few"), "clients_per_round must be a whole number of at least 1"),
        (dict(seed=3), "run has seed, which the plan's own fields set"),
    ],
)
def test_the_options_of_a_plan_are_checked_when_it_is_read(run, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(table_plan(), run=run)


def test_numpy_numbers_are_numbers():
    assert RunOptions(rounds=np.int64(4), dropout=np.float32(0.5)) == RunOptions(rounds=4, dropout=0.5)


@pytest.mark.parametrize(
    ("values", "participation"),
    [
        ({}, Everyone()),
        (dict(clients_per_round=3), Uniform(3)),
        (dict(bernoulli=0.3), Bernoulli(0.3)),
        (dict(clients_per_round=3, dropout=0.1), Dropouts(Uniform(3), 0.1)),
    ],
)
def test_who_takes_part(values, participation):
    assert RunOptions(rounds=1, **values).participation() == participation


def test_a_configuration_comes_back_as_it_was_written():
    options = RunOptions(rounds=30, every=5, bernoulli=0.4, seed=9)
    made = Configuration.resolve("quadratic", {"clients": 3}, "simfbo", {"gamma_x": 0.1}, options)
    assert Configuration.read(made.plain()) == made
    with pytest.raises(InputError, match="unknown entry 'evry'; did you mean every"):
        Configuration.read({**made.plain(), "evry": 3})
    with pytest.raises(InputError, match="missing required field `algorithm`"):
        Configuration.read({k: v for k, v in made.plain().items() if k != "algorithm"})
