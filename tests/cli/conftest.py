from pathlib import Path

import pytest
from support.models import meta, mlp

from autoshard.graph import export_model


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported network of two layers."""
    model, kwargs = meta(mlp, 64, 512, 512, 512)
    path = tmp_path_factory.mktemp("cli") / "mlp.pt2"
    path.write_bytes(export_model(model, (), kwargs))
    return path
