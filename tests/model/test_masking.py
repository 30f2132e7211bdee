"""Masked diffusion through the arguments of the model."""

from __future__ import annotations

import pytest

from alphastomics.diffusion import MaskingConfig
from alphastomics.model import AlphaSTomics


def test_a_masked_training_and_its_files(small, make_model, train_briefly, weights_of, positions_of, tmp_path):
    masking = MaskingConfig(mask_strategy="block", masking_probability=1.0, mask_ramp_steps=3)
    model = train_briefly(
        make_model(small, mode="any", enable_masking=True), max_epochs=4, masking=masking, validation_size=0.5
    )
    assert model.trainer.lightning_module.objective.masking == masking
    assert bool(model.module.expression_mask.any())
    assert "train_masked" in model.history
    assert "validation_masked" not in model.history
    assert "train_expression" in model.history
    model.save(tmp_path / "m")
    loaded = AlphaSTomics.load(tmp_path / "m", adata=small)
    assert weights_of(loaded) == weights_of(model)
    assert positions_of(loaded.sample(small)) == positions_of(model.sample(small))
    train_briefly(loaded)
    assert loaded.trainer.lightning_module.objective.masking == MaskingConfig()


def test_masking_is_off_by_default(small, make_model, train_briefly):
    model = train_briefly(make_model(small, mode="expr_to_pos"))
    assert model.trainer.lightning_module.objective.masking is None
    assert not any("mask" in name for name, _ in model.module.named_parameters())
    assert not {"train_masked", "train_expression"} & set(model.history)


def test_masks_for_a_model_without_tokens_raise(small, make_model, train_briefly):
    model = make_model(small)
    with pytest.raises(ValueError, match="enable_masking=True"):
        train_briefly(model, masking=MaskingConfig())
    assert not model.is_trained_
