"""Which torch the patches of whole models take: one that changed is refused, or left as it is."""

import pytest
from torch.nn.utils import clip_grad

import torch_overlay
from torch_overlay import errors, versions
from torch_overlay.torch_patches import norms
from way import needs_package

pytestmark = needs_package
CLIP = "torch.nn.utils.clip_grad"


@pytest.mark.parametrize("changed", ["_get_total_norm", "_clip_grads_with_norm_"])
def test_another_way_to_clip_is_refused(changed, monkeypatch):
    """Both functions are left alone then, since one alone would take gradients that the other doesn't."""
    known = versions.fingerprints()[versions.running().compared_with][CLIP]
    monkeypatch.setitem(known, "file", "another")
    monkeypatch.setitem(known, changed, "another")
    with pytest.raises(errors.ChangedTarget, match=f"{CLIP}:{changed}: .* with another body"):
        torch_overlay.enable()
    with torch_overlay.enabled(strict=False) as status:
        states = {row.target.partition(":")[2]: row.state for row in status.rows if row.target.startswith(CLIP)}
        assert states == {"_get_total_norm": "left out", "_clip_grads_with_norm_": "left out"}
        assert norms._cell(clip_grad._get_total_norm).cell_contents is norms.one_norm
        assert norms._cell(clip_grad._clip_grads_with_norm_).cell_contents is norms.scale_one


def test_a_clip_that_somebody_replaced_is_refused(monkeypatch):
    monkeypatch.setattr(clip_grad, "_get_total_norm", lambda *tensors: None)
    with pytest.raises(errors.ChangedTarget, match=f"{CLIP}:_get_total_norm: somebody replaced it by .*lambda"):
        torch_overlay.enable()


def test_clipping_is_torchs_again_afterwards():
    cells = [norms._cell(each) for each in (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)]
    with torch_overlay.enabled():
        assert [cell.cell_contents for cell in cells] == [norms.total_norm, norms.clip_with_norm]
    assert [cell.cell_contents for cell in cells] == [norms.one_norm, norms.scale_one]
