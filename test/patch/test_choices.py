"""Options: names, values, texts, and where they come from."""

import dataclasses

import pytest

from torch_overlay import choices
from torch_overlay.choices import DEFAULT
from torch_overlay.errors import OptionError, OverlayError


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("share_groups", "maybe", "share_groups is one of 'names', 'ranks', 'off', not 'maybe'$"),
        ("share_groups", True, "share_groups is one of .* not True$"),
        ("create", "some", "create is one of 'members', 'world', not 'some'"),
        ("flatten", None, "flatten is one of 'whole', 'existing', not None$"),
        ("check_mesh", 1.0, "check_mesh is on or off"),
        (
            "leave_out",
            "clip_grad_norms",
            "leave_out takes some of 'cross_mesh', .* not 'clip_grad_norms'; did you mean",
        ),
        ("leave_out", 3, "leave_out takes some of .*, not 3$"),
        ("flaten", None, "There is no option 'flaten'; did you mean 'flatten'"),
        ("topology", {"tp": (1e9, 1e-6)}, "There is no option 'topology'. Options: share_groups, "),
    ],
)
def test_a_wrong_value_says_what_it_takes(name, value, words):
    with pytest.raises(OptionError, match=words) as caught:
        choices.choose(DEFAULT, {name: value})
    assert isinstance(caught.value, OverlayError) and isinstance(caught.value, ValueError)


def test_texts_and_values_mean_the_same():
    given = {"share_groups": "off", "check_mesh": True, "create": "world"}
    given["leave_out"] = ("clip_grad_norm",)
    texts = {"SHARE_GROUPS": "off", "CHECK_MESH": "1", "CREATE": "world"}
    texts["LEAVE_OUT"] = "clip_grad_norm"
    environ = {"TORCH_OVERLAY_" + name: text for name, text in texts.items()}
    assert choices.from_environment(environ) == choices.choose(DEFAULT, given)
    assert choices.from_environment({"TORCH_OVERLAY_LEAVE_OUT": "none"}) == DEFAULT
    again = choices.choose(DEFAULT, dataclasses.asdict(choices.from_environment(environ)))
    assert again == choices.from_environment(environ)


def test_a_wrong_text_names_the_environment():
    for name, text, words in (
        ("FLATTEN", "create", "flatten is one of 'whole', 'existing', not 'create'"),
        ("CHECK_MESH", "maybe", "check_mesh is on or off"),
    ):
        with pytest.raises(OptionError, match=rf"{words}.*\(from the environment, TORCH_OVERLAY_{name}='{text}'\)"):
            choices.from_environment({"TORCH_OVERLAY_CREATE": "world", f"TORCH_OVERLAY_{name}": text})
    with pytest.raises(OptionError, match="TORCH_OVERLAY_STRICT is on or off"):
        choices.strict_from_environment({"TORCH_OVERLAY_STRICT": "very"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("CHEK_MESH", "CHECK_MESH"), ("FLATEN", "FLATTEN"), ("STRIKT", "STRICT"), ("MEET_KYE", "MEET_KEY")],
)
def test_a_misspelt_variable_is_an_error(name, meant):
    """Once it was a warning, which programs hide: the check wasn't on, or what ranks said wasn't signed."""
    with pytest.raises(OptionError, match=f"TORCH_OVERLAY_{name} is no option; did you mean TORCH_OVERLAY_{meant}.$"):
        choices.from_environment({f"TORCH_OVERLAY_{name}": "1"})


def test_an_unknown_variable_warns_and_the_engines_own_do_not(recwarn):
    choices.from_environment({"TORCH_OVERLAY_RUN": "1", "TORCH_OVERLAY_STRICT": "off", "OTHER": "x"})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="TORCH_OVERLAY_HOME is no option"):
        assert choices.from_environment({"TORCH_OVERLAY_HOME": "x"}) == DEFAULT


@pytest.mark.parametrize(
    "given", [("clip_grad_norm", "cross_mesh"), "clip_grad_norm, cross_mesh", ["cross_mesh", "clip_grad_norm"]]
)
def test_what_is_left_out_is_a_set_of_words(given):
    assert choices.choose(DEFAULT, {"leave_out": given}).leave_out == ("cross_mesh", "clip_grad_norm")
