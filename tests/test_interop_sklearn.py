# SPDX-License-Identifier: Apache-2.0
"""Attributes of a StandardScaler; scikit-learn itself: interop/check_numpy.py."""

import types

import numpy as np
import pytest

from nnx_norm import Normalizer
from nnx_norm.interop import from_sklearn, to_sklearn
from nnx_norm.moved import exported


def test_export_and_import_keep_the_divisor():
    norm = Normalizer(3)
    norm.set_statistics([1.0, 2.0, 3.0], [4.0, 9.0, 0.0], 10)
    fields = to_sklearn(norm)
    assert fields["var_"].tolist() == [4.0, 9.0, 0.0]
    scaler = types.SimpleNamespace(with_mean=True, with_std=True, **fields)
    back = from_sklearn(scaler)
    assert back.count == 10
    assert exported(back).std.tolist() == pytest.approx([2.0, 3.0, 1e-3])
    assert exported(back).mean.tolist() == [1.0, 2.0, 3.0]


def test_smallest_of_several_counts_stands_for_all():
    scaler = types.SimpleNamespace(
        **{"with_mean": True, "with_std": True, "n_features_in_": 2},
        **{"mean_": np.ones(2), "var_": np.ones(2), "scale_": np.ones(2)},
        n_samples_seen_=np.array([9, 7]),
    )
    assert from_sklearn(scaler).count == 7


def test_what_a_scaler_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        to_sklearn(Normalizer((2, 2)))
    with pytest.raises(ValueError, match="expected one array"):
        to_sklearn(Normalizer({"a": 1}))
    with pytest.raises(ValueError, match="n_samples_seen_"):
        from_sklearn(types.SimpleNamespace(with_std=True))
