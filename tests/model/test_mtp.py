import torch

from paddock.model import AttentionMetadata, AuxRequest
from tests.model.networks import build_network, latent_config, tokens

NETWORK = build_network(latent_config())


def look_ahead(lengths: list[int], token_T: torch.Tensor, depths: int = 3) -> list[torch.Tensor]:
    layout = AttentionMetadata.packed(lengths)
    step = NETWORK.make_context(layout)
    hidden_TD = NETWORK(token_T, layout).hidden_TD
    return [h for h, _ in NETWORK.mtp_forward(hidden_TD, token_T, step, depths)]


@torch.no_grad()
def test_depth_d_depends_on_tokens_up_to_d_ahead_only():
    first, second = tokens(30), tokens(30)
    second[20] = (second[20] + 1) % 50
    for depth, (one, other) in enumerate(
        zip(look_ahead([30], first), look_ahead([30], second), strict=True), start=1
    ):
        same = (one == other).all(-1)
        assert bool(same[: 20 - depth].all())
        assert not bool(same[20 - depth])


@torch.no_grad()
def test_documents_do_not_see_each_other():
    lengths = [12, 2, 9]
    documents = [tokens(n, seed) for seed, n in enumerate(lengths)]
    packed = look_ahead(lengths, torch.cat(documents))
    alone = [look_ahead([len(d)], d) for d in documents]
    for depth in range(3):
        torch.testing.assert_close(
            packed[depth], torch.cat([a[depth] for a in alone]), atol=1e-5, rtol=1e-5
        )


def test_one_parameter_set_serves_all_depths():
    network = build_network(latent_config())
    layout = AttentionMetadata.packed([20])
    hidden_TD = network(tokens(20), layout).hidden_TD.detach()

    def gradient(depths: slice) -> torch.Tensor:
        network.zero_grad()
        states = [
            h
            for h, _ in network.mtp_forward(hidden_TD, tokens(20), network.make_context(layout), 3)
        ]
        sum(state.square().sum() for state in states[depths]).backward()
        return network.mtp.join.weight.grad.clone()

    parts = [gradient(slice(d, d + 1)) for d in range(3)]
    assert all(bool(part.any()) for part in parts)
    torch.testing.assert_close(gradient(slice(0, 3)), sum(parts), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_depths_that_share_the_index_use_the_first_selection():
    shared = build_network(latent_config(mtp={"depths": 3, "share_index": True}))
    layout, token_T = AttentionMetadata.packed([30]), tokens(30)
    hidden_TD = shared(token_T, layout).hidden_TD

    def selections(network):
        step = network.make_context(
            layout, aux=AuxRequest(routing_and_topk=True, indexer_loss=True)
        )
        ahead = list(network.mtp_forward(hidden_TD, token_T, step, 3))
        kept = [notes.selection.index_QK.tolist() for _, notes in ahead]
        return kept, [notes.indexer_loss is not None for _, notes in ahead]

    (first, *later), learns = selections(shared)
    assert len(first) == 30 - 8  # queries that see more than eight keys
    assert later == [first, first]
    assert learns == [True, False, False]  # the indexer runs once
    (first, *later), learns = selections(NETWORK)
    assert first not in later
    assert learns == [True] * 3
