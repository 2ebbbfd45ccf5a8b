import torch

from paddock.model.roles import parameter_roles
from paddock.records import ParameterRole
from paddock.records.parameter import MuonSplit
from tests.model.networks import build_network, grouped_config, latent_config


def roles(network, **options) -> dict[str, ParameterRole]:
    return {name: role for name, _, role in parameter_roles(network, network.config, **options)}


def test_every_parameter_has_a_role_that_fits_its_shape():
    for network in (
        build_network(latent_config()),
        build_network(grouped_config("gqa", "swa", "gdn", "simple_gdn")),
    ):
        declared = network.parameter_roles()
        assert [name for name, _, _ in declared] == [name for name, _ in network.named_parameters()]
        for name, parameter, role in declared:
            assert (role.kind == "vector") == (parameter.ndim == 1), name
            if role.split is not None:
                assert role.split.num_rows == parameter.shape[-2], name


def test_up_projections_are_split_by_head_and_experts_by_gate_and_up():
    found = roles(build_network(latent_config()))
    assert found["layers.0.attention.q_b.weight"].split == MuonSplit(heads=4, rows=(12,))
    assert found["layers.0.attention.kv_b.weight"].split == MuonSplit(heads=4, rows=(8, 10))
    assert found["layers.1.mlp.experts.gate_up"].split == MuonSplit(rows=(16, 16))
    assert found["mtp.block.attention.kv_b.weight"].split == MuonSplit(heads=4, rows=(8, 10))
    assert found["layers.0.attention.o.weight"] == ParameterRole("matrix")


def test_rope_rows_may_be_split_too():
    found = roles(build_network(latent_config()), split_rope_rows=True)
    assert found["layers.0.attention.q_b.weight"].split == MuonSplit(heads=4, rows=(8, 4))


def test_embedding_head_and_router_are_not_muon_matrices():
    found = roles(build_network(latent_config()))
    kinds = {
        name: role.kind for name, role in found.items() if role.kind not in ("matrix", "vector")
    }
    assert kinds == {
        "embed.weight": "embedding",
        "head.weight": "head",
        **{f"layers.{i}.mlp.router.weight": "router" for i in (1, 2, 3)},
        "mtp.block.mlp.router.weight": "router",
    }


def test_a_tied_head_is_one_parameter():
    network = build_network(grouped_config("gqa", tied=True))
    assert roles(network)["embed.weight"].kind == "embedding"
    assert "head.weight" not in roles(network)
    assert isinstance(network.head.weight, torch.nn.Parameter)


def test_the_indexer_and_the_mtp_layer_are_separate_components():
    found = roles(build_network(latent_config()))
    for name, role in found.items():
        mtp, indexer = name.startswith("mtp."), ".indexer." in name
        expected = "_".join(["mtp"] * mtp + ["indexer"] * indexer) or "main"
        assert role.part == expected, name
    assert {role.part for role in found.values()} == {"main", "indexer", "mtp", "mtp_indexer"}


def test_routers_and_index_weights_stay_float32():
    network = build_network(latent_config())
    names = {name for name in network.state_dict() if name.endswith("indexer.weights.weight")}
    assert {name for name, _, role in network.parameter_roles() if role.keep_fp32} == names
    biases = {name for name in network.state_dict() if name.endswith("router.bias")}
    assert network.fp32_tensor_names() == names | biases
    network.cast(torch.bfloat16)
    wide = {name for name, p in network.named_parameters() if p.dtype == torch.float32}
    assert wide == names
