"""What a site insists on: rows behind each answer, and a ceiling on what the server's knobs make it build."""

import dataclasses
import re

import pytest

from fedbilevel.core.devices import memory_ceiling, require_memory
from fedbilevel.errors import InputError
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.tasks.quadratic import Quadratic


def own(batch_size=None):
    population = Quadratic(clients=2, noise=0.1, rows=32).build().population.only(0)
    return dataclasses.replace(population, batch_size=batch_size)


@pytest.mark.parametrize(
    ("policy", "population", "line"),
    [
        (dict(least_batch_size=9), dict(batch_size=8), "insists on batch_size >= 9, but the run has 8: refused"),
        (dict(least_batch_size=8), dict(batch_size=8), ""),
        (dict(least_batch_size=9), {}, ""),  # without minibatches all rows count
        (dict(least_rows=32), {}, ""),
        (dict(least_rows=33), {}, "insists on at least 33 rows behind an answer: refused"),
        (dict(least_rows=9), dict(batch_size=8), "insists on at least 9 rows behind an answer: refused"),
    ],
)
def test_a_site_insists_on_the_rows_behind_an_answer(policy, population, line):
    if not line:
        return SitePolicy(**policy).agree_rows(own(**population))
    with pytest.raises(InputError, match=re.escape(line)):
        SitePolicy(**policy).agree_rows(own(**population))


@pytest.mark.parametrize("knob", ["clients", "x_dimension", "y_dimension", "rows"])
def test_what_the_servers_knobs_ask_for_is_refused_before_it_is_built(tmp_path, knob):
    """With the memory that is there, each would be built."""
    (tmp_path / "site.toml").write_text('task = "quadratic"\nloader = "share"\n[policy]\nmemory = 0.001\n')
    site = SiteData.read(tmp_path / "site.toml")
    with (
        memory_ceiling(site.policy.memory * 1e9),
        pytest.raises(InputError, match="of memory are needed"),
    ):
        site.load(site.configured("task", "quadratic", {}, {"noise": 0.1, knob: 10**4}))


def test_a_minibatch_is_below_the_same_ceiling():
    population = own(batch_size=10**6)
    SitePolicy().agree_rows(population)
    with memory_ceiling(1e6), pytest.raises(InputError, match=r"a minibatch: .* lower batch_size"):
        SitePolicy().agree_rows(population)


def test_a_ceiling_ends_with_its_block():
    with pytest.raises(InputError, match="the rows"), memory_ceiling(10):
        require_memory("the rows", 11, "give fewer")
    require_memory("the rows", 11, "give fewer")


def test_a_policy_that_allows_nothing_is_refused(tmp_path):
    (tmp_path / "site.toml").write_text('task = "quadratic"\nloader = "share"\n[policy]\nmemory = 0\n')
    with pytest.raises(InputError, match="memory must be a number of gigabytes above 0"):
        SiteData.read(tmp_path / "site.toml")
