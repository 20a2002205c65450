"""The drafter that comes with eyas is a sound checkpoint of the default target."""

import pytest

from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import find_folder, load_drafter
from eyas.drafter.recorded_acceptance import read_acceptance
from eyas.drafter.shipped import DEFAULT_DRAFTER, SHIPPED, shipped_folder
from eyas.target.facts import read_facts


@each("name", SHIPPED)
def test_a_name_leads_to_a_folder_that_fits_a_package(name: str) -> None:
    folder = shipped_folder(name)
    assert folder is not None
    assert find_folder(name) == folder
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 32_000_000


def test_other_names_are_not_ours() -> None:
    assert shipped_folder("org/name") is None


def test_the_default_drafter_is_eagle_31() -> None:
    drafter = load_drafter(DEFAULT_DRAFTER["smollm2"])
    assert drafter.config.family == "EAGLE-3.1"
    assert drafter.config.dtype == "bfloat16"


@pytest.mark.default
def test_shipped_drafters_pass_the_check_against_their_target() -> None:
    for target, name in DEFAULT_DRAFTER.items():
        report = check(name, target=read_facts(target))
        assert report.ok
        assert not report.findings


def test_every_one_says_how_often_it_is_accepted() -> None:
    for name in SHIPPED:
        folder = shipped_folder(name)
        assert folder is not None
        recorded = read_acceptance(folder)
        assert recorded is not None
        assert len(recorded.by_depth()) == 7
