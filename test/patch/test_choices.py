"""Options: names, values, texts, and where they come from."""

import dataclasses

import pytest

from torch_overlay import choices, series
from torch_overlay.choices import DEFAULT, Choices
from torch_overlay.errors import OptionError, OverlayError


def test_every_option_has_a_reader_and_its_default_passes_it():
    assert [field.name for field in dataclasses.fields(Choices)] == list(choices.READERS)
    assert choices.choose(DEFAULT, dataclasses.asdict(DEFAULT)) == DEFAULT


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("share_groups", "maybe", "share_groups is one of 'names', 'ranks', 'world', 'off', not 'maybe'$"),
        ("share_groups", True, "not True. What was True is 'world' now"),
        ("share_groups", "on", "not 'on'. What was 'on' is 'world' now"),
        ("share_groups", False, "not False. What was False is 'off' now"),
        ("create", "some", "create is one of 'members', 'world', not 'some'"),
        ("flatten", None, "flatten is one of 'whole', 'existing', 'create', not None$"),
        ("flatten", "any", "not 'any'. What was 'any' is 'whole' now"),
        ("check_mesh", 1.0, "check_mesh is on or off"),
        ("cost", "cheap", "cost is one of 'stock', 'plan'"),
        ("topology", "tp", "topology is a mapping like"),
        ("topology", {"tp": 5}, "topology is a mapping like"),
        ("topology", {"tp": (1, 2, 3)}, "topology is a mapping like"),
        ("topology", {"tp": (0, 1)}, "a bandwidth is above 0"),
        ("topology", {"tp": (1, -1)}, "a latency isn't below it"),
        ("topology", {"tp": (float("nan"), 1)}, "a bandwidth is above 0"),
        ("topology", "tp=1:1,tp=2:2", "names an axis twice"),
        ("topology", {3: (1, 1)}, "topology is a mapping like"),
        (
            "leave_out",
            "clip_grad_norms",
            "leave_out takes some of 'cross_mesh', .* not 'clip_grad_norms'; did you mean",
        ),
        ("leave_out", 3, "leave_out takes some of .*, not 3$"),
        ("topologie", None, "There is no option 'topologie'; did you mean 'topology'"),
    ],
)
def test_a_wrong_value_says_what_it_takes(name, value, words):
    with pytest.raises(OptionError, match=words) as caught:
        choices.choose(DEFAULT, {name: value})
    assert isinstance(caught.value, OverlayError) and isinstance(caught.value, ValueError)


def test_texts_and_values_mean_the_same():
    given = {"share_groups": "off", "check_mesh": True, "create": "world", "topology": {"tp": (1e9, 1e-6)}}
    given["leave_out"] = ("clip_grad_norm",)
    texts = {"SHARE_GROUPS": "off", "CHECK_MESH": "1", "CREATE": "world", "TOPOLOGY": "tp=1e9:1e-6"}
    texts["LEAVE_OUT"] = "clip_grad_norm"
    environ = {"TORCH_OVERLAY_" + name: text for name, text in texts.items()}
    assert choices.from_environment(environ) == choices.choose(DEFAULT, given)
    assert choices.from_environment({"TORCH_OVERLAY_TOPOLOGY": "none"}) == DEFAULT
    again = choices.choose(DEFAULT, dataclasses.asdict(choices.from_environment(environ)))
    assert again == choices.from_environment(environ)


def test_a_wrong_text_names_the_environment():
    with pytest.raises(OptionError, match=r"cost is one of .*environment"):
        choices.from_environment({"TORCH_OVERLAY_COST": "cheap"})
    with pytest.raises(OptionError, match="TORCH_OVERLAY_STRICT is on or off"):
        choices.strict_from_environment({"TORCH_OVERLAY_STRICT": "very"})


def test_an_unknown_variable_warns_and_the_engines_own_do_not(recwarn):
    choices.from_environment({"TORCH_OVERLAY_RUN": "1", "TORCH_OVERLAY_STRICT": "off", "OTHER": "x"})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="TORCH_OVERLAY_FLATEN is no option"):
        assert choices.from_environment({"TORCH_OVERLAY_FLATEN": "x"}) == DEFAULT


@pytest.mark.parametrize(
    "given", [("clip_grad_norm", "cross_mesh"), "clip_grad_norm, cross_mesh", ["cross_mesh", "clip_grad_norm"]]
)
def test_what_is_left_out_is_a_set_of_words(given):
    assert choices.choose(DEFAULT, {"leave_out": given}).leave_out == ("cross_mesh", "clip_grad_norm")


def test_what_can_be_left_out_are_units_of_the_series():
    assert set(choices.OPTIONAL) <= {patch.unit for patch in series.PATCHES}
