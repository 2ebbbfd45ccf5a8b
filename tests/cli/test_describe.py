import json

import pytest
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from paddock.checkpoint import save_pretrained
from paddock.checkpoint.load import meta_model
from paddock.cli.__main__ import app
from paddock.model import PRESETS, Transformer, preset


class NoTensors(TorchFunctionMode):
    """Raises on any torch operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"torch was called: {function}")


def describe(*arguments):
    with NoTensors():
        done = CliRunner().invoke(app, ["model", "describe", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_glm5_has_the_parameter_counts_of_the_paper():
    output = describe("glm5")
    for number in ("743.91 B", "753.86 B", "39.88 B", "89,856 B", "19,968 B", "13.41 GiB"):
        assert number in output


def test_tables_fit_into_a_narrow_pipe():
    for name in PRESETS:
        head, *tables = describe(name).splitlines()
        assert head.startswith(f"{name}: ")
        assert max(map(len, tables)) <= 80
        assert "\x1b" not in head


@pytest.mark.parametrize("name", ["nano", "small", "glm4.7-flash", "glm5"])
def test_parameter_counts_are_those_of_the_network(name):
    output = json.loads(describe(name, "--json"))
    network = meta_model(preset(name))
    tensors = network.state_dict()
    assert output["parameters"]["with_mtp"] == sum(t.numel() for t in tensors.values())
    norms = sum(t.numel() for n, t in tensors.items() if "norm." in n and "mtp." not in n)
    assert output["parameters"]["norms"] == norms - _index_norms(tensors)


def _index_norms(tensors):
    """Norms of the indexer, which are counted with it."""
    return sum(
        tensor.numel()
        for name, tensor in tensors.items()
        if "indexer.key_norm" in name and "mtp." not in name
    )


def test_json_has_the_flops_ratio_of_dense_to_sparse():
    output = json.loads(describe("glm5", "--json"))["flops_per_token"]
    assert list(output) == ["4K", "32K", "128K", "200K"]
    ratios = [row["dense_over_sparse"] for row in output.values()]
    assert ratios == sorted(ratios)
    assert 1 < ratios[0] < 1.2 < ratios[1]
    for row in output.values():
        assert row["total"] == row["weights"] + row["attention"] + row["indexer"]


def test_a_folder_is_described_like_its_preset(tmp_path):
    save_pretrained(Transformer.from_config(preset("nano"), 0), tmp_path / "nano")
    folder = json.loads(describe(str(tmp_path / "nano"), "--json"))
    named = json.loads(describe("nano", "--json"))
    assert folder | {"name": "nano"} == named


def test_a_missing_part_has_no_row(tmp_path):
    config = preset("nano").model_copy(update={"mtp": None})
    save_pretrained(Transformer.from_config(config, 0), tmp_path / "nano")
    assert "MTP" not in describe(str(tmp_path / "nano"))


def test_brackets_in_a_name_are_not_markup(tmp_path):
    save_pretrained(Transformer.from_config(preset("nano"), 0), tmp_path / "[red]")
    assert f"{tmp_path}/[red]: glm_moe_dsa" in describe(str(tmp_path / "[red]"))


def test_an_unknown_name_lists_the_presets():
    done = CliRunner().invoke(app, ["model", "describe", "nanoo"])
    assert done.exit_code == 1
    assert done.stderr == (
        "error: 'nanoo' is neither a preset nor a folder; did you mean 'nano'? "
        f"presets: {', '.join(PRESETS)}\n"
    )
