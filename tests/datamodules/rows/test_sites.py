"""Sites as users write them: what no model could have is refused before one is loaded."""

import pytest

from aligners.cli.table import known_options
from aligners.cli.words import as_parsed
from aligners.datamodules.pairings import pair_states, universe_states
from aligners.datamodules.rows.sites import parse_sites, route_sites, sites_of_each
from aligners.errors import UserError

FIT = known_options("train", "fit")


@pytest.mark.parametrize("sites", ["1:b", "1:2:3", "[1:2]", "", "1,1", "every"])
def test_sites_that_are_wrong_for_any_model_are_refused_before_one_is_loaded(sites: str) -> None:
    with pytest.raises(UserError, match="Expected `sites` to"):
        pair_states("no/model", "nor/this", sites=sites)
    with pytest.raises(UserError, match="Expected `sites` to"):
        universe_states(["no/model", "nor/this", "nor/that"], sites="1:2")
    pair_states("no/model", "nor/this", sites="1,15:9")


@pytest.mark.parametrize("written", ["[15:9]", "[1, 15:9]", "[1,2:30 ]"])
def test_a_pair_that_yaml_would_read_as_one_number_is_refused_at_once(written: str) -> None:
    with pytest.raises(UserError, match=r"`--data\.sites` .* YAML reads (15:9|2:30) as a number of base 60"):
        as_parsed(FIT, ["--data.sites", written])


@pytest.mark.parametrize("written", ["15:9", '["15:9"]', "[1, 2]", "all"])
def test_other_pairs_are_left_alone(written: str) -> None:
    assert as_parsed(FIT, ["--data.sites", written]) == [f"--data.sites={written}"]


def test_norm_is_one_above_the_blocks_of_each_model() -> None:
    assert parse_sites("norm, 1, 2:norm, norm:3", 4, 6) == [(5, 7), (1, 1), (2, 7), (5, 3)]
    assert route_sites("1:norm", [4, 6], 1, 0) == [(7, 1)]
    with pytest.raises(UserError, match="Expected `sites` to"):
        parse_sites("1:Norm", 4, 6)
    with pytest.raises(UserError, match="Expected `sites` to"):  # the depth is not known yet
        sites_of_each("norm", [-1])
