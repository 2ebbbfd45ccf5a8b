"""A network on disk and its quantized folder, made once for all read-only tests."""

import pytest

from paddock.quant import quantize_folder
from tests.quant.tiny import QUICK, folder_of, network, text


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    folder = folder_of(network(), tmp_path_factory.mktemp("source") / "model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def target(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "model"
    quantize_folder(source, folder, QUICK, passages=text())
    return folder
