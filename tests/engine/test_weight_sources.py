"""Weight updates from every source, whole or in buckets, valid or not, while requests run."""

import asyncio
import pickle

import pytest
import torch

from paddock.checkpoint import CheckpointError, save_pretrained
from paddock.checkpoint.tensor_names import is_mtp
from paddock.checkpoint.weight_sync import WeightUpdate, iter_released_tensors, weight_digests
from paddock.engine import EngineWeightUpdater, WeightVersionLabels
from tests.engine.networks import copy_of, engine, greedy, network
from tests.engine.test_weight_versions import logprobs_of, other
from tests.engine.weight_updates import (
    HEAD,
    NORM,
    PROMPT,
    PROMPTS,
    assert_serves_new_weights,
    assert_serves_old_weights,
    buckets,
    digests,
    packed,
    tensors,
)
from tests.model.networks import build_network, latent_config

MODES = ["abort", "retract", "in_place"]


@pytest.fixture
def serving():
    with engine(copy_of(network("sparse"))) as found:
        yield found
        assert found.audit() == []


# --- while requests run -------------------------------------------------------------------------


def from_disk(updater, folder, mode):
    save_pretrained(other(), folder)
    updater.update_from_disk(str(folder), version=7, mode=mode)


def from_bytes(updater, _, mode):
    updater.update_from_tensor([packed(names) for names in buckets(2)], version=7, mode=mode)


def from_network(updater, _, mode):
    updater.update_from_model(other(), version=7, mode=mode)


def published(updater, _, mode):
    parts = (WeightUpdate(7, {n: tensors()[n] for n in names}) for names in buckets(3))
    updater.weight_publisher(mode)(parts)


def while_running(serving, change):
    """Outputs of requests that were all running when `change` was called."""

    async def main():
        started = [asyncio.Event() for _ in PROMPTS]

        async def reply(i):
            async for delta in serving.stream(greedy(PROMPTS[i], 24)):
                started[i].set()
                if delta.output is not None:
                    return delta.output

        tasks = [asyncio.create_task(reply(i)) for i in range(len(PROMPTS))]
        for event in started:
            await event.wait()
        await asyncio.to_thread(change)
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


WAYS = [(source, mode, False) for source in (from_disk, from_bytes) for mode in MODES]
WAYS += [(from_network, "retract", False), (published, "in_place", False)]
WAYS += [(from_disk, "in_place", True), (published, "retract", True)]


@pytest.mark.parametrize(("source", "mode", "in_place_buckets"), WAYS)
def test_every_token_belongs_to_the_weights_that_sampled_it(
    serving, tmp_path, source, mode, in_place_buckets
):
    updater = EngineWeightUpdater(serving, in_place_buckets=in_place_buckets)
    after = 0

    def change():
        serving.pause("in_place")  # or they might finish before the update
        source(updater, tmp_path / "new", mode)
        serving.resume()

    for prompt, answer in zip(PROMPTS, while_running(serving, change), strict=True):
        done = answer.completion
        before = done.versions[0].tokens
        versions = [segment.version for segment in done.versions]
        assert versions in ([0], [0, 7])
        assert sum(segment.tokens for segment in done.versions) == len(done.token_ids)
        got = torch.tensor(done.logprobs)
        old = logprobs_of(network("sparse"), prompt, done.token_ids)
        new = logprobs_of(other(), prompt, done.token_ids)
        torch.testing.assert_close(got[:before], old[:before], atol=1e-5, rtol=0)
        if mode == "retract":
            torch.testing.assert_close(got[before:], new[before:], atol=1e-5, rtol=0)
        if mode == "abort":
            assert versions == [0]
        after += len(got) - before
    assert (after == 0) == (mode == "abort")
    assert updater.checksums() == digests("new")
    assert updater.last_update.version == 7
    assert updater.last_update.tensors == len(tensors())
    assert updater.last_update.bytes == sum(t.nbytes for t in tensors().values())
    assert_serves_new_weights(serving)


@pytest.mark.parametrize("in_place_buckets", [False, True])
def test_an_engine_that_was_not_paused_keeps_running(serving, in_place_buckets):
    updater, running = EngineWeightUpdater(serving, in_place_buckets=in_place_buckets), []
    answers = while_running(
        serving,
        lambda: running.append(updater.update_from_model(other(), version=7, mode="retract")),
    )
    assert running == [sum(answer.preemptions for answer in answers)]
    assert [len(answer.completion.token_ids) for answer in answers] == [24] * len(PROMPTS)
    assert updater.last_update.paused_s > 0
    assert not serving.stats().paused
    assert_serves_new_weights(serving)


# --- invalid updates ----------------------------------------------------------------------------


def corrupted(data):
    spoiled = bytearray(data)
    spoiled[-3] ^= 1
    return bytes(spoiled)


WRONG = {
    "unexpected tensor": lambda: packed([HEAD], **{"model.layers.9.x": torch.ones(2)}),
    "has shape": lambda: packed([HEAD], **{NORM: torch.ones(3)}),
    "holds nan": lambda: packed([HEAD], **{NORM: torch.full((32,), float("nan"))}),
    "holds inf": lambda: packed([HEAD], **{NORM: torch.full((32,), float("inf"))}),
    "torch.int64": lambda: packed([HEAD], **{NORM: torch.ones(32, dtype=torch.int64)}),
    "float8": lambda: packed([HEAD], **{NORM: torch.ones(32).to(torch.float8_e4m3fn)}),
    "pickle": lambda: pickle.dumps({NORM: [1.0] * 32}),
    "checksum": lambda: corrupted(packed([HEAD, NORM])),
    "safetensors": lambda: packed([HEAD])[:-40],
}


@pytest.mark.parametrize("why", WRONG)
def test_wrong_tensors_change_nothing_and_keep_the_prefix_cache(serving, why):
    updater, first = EngineWeightUpdater(serving), "model.embed_tokens.weight"
    serving.generate_output(greedy(PROMPT))
    with pytest.raises(CheckpointError, match=why):
        updater.update_from_tensor([packed([first]), WRONG[why]()], version=7, mode="abort")
    assert_serves_old_weights(serving, updater)
    assert serving.generate_output(greedy(PROMPT)).cached_tokens == 16
    assert updater.last_update is None


def test_a_duplicate_tensor_is_rejected(serving):
    updater = EngineWeightUpdater(serving)
    with pytest.raises(CheckpointError, match=f"'{HEAD}' was sent twice"):
        updater.update_from_tensor([packed([HEAD]), packed([HEAD])], version=7, mode="in_place")
    assert_serves_old_weights(serving, updater)


def test_a_folder_of_another_network_is_rejected(serving, tmp_path):
    updater = EngineWeightUpdater(serving)
    turned = latent_config().rope.model_copy(update={"theta": 200.0})
    save_pretrained(build_network(latent_config(rope=turned), seed=11), tmp_path / "turned")
    with pytest.raises(CheckpointError, match=r"'rope' is .*200.* it is .*100"):
        updater.update_from_disk(tmp_path / "turned", version=7, mode="abort")
    with pytest.raises(CheckpointError, match="folder not found"):
        updater.update_from_disk(tmp_path / "nowhere", version=7, mode="abort")
    (tmp_path / "turned" / "model.safetensors").rename(tmp_path / "turned" / "model.bin")
    with pytest.raises(CheckpointError, match=r"pickle|rope"):
        updater.update_from_disk(tmp_path / "turned", version=7, mode="abort")
    assert_serves_old_weights(serving, updater)


@pytest.mark.parametrize("in_place_buckets", [False, True])
def test_a_folder_without_mtp_keeps_the_engines_mtp_layer(serving, tmp_path, in_place_buckets):
    config = latent_config(mtp=None)
    bare = build_network(config, seed=3)
    save_pretrained(bare, tmp_path / "bare")
    updater = EngineWeightUpdater(serving, in_place_buckets=in_place_buckets)
    updater.update_from_disk(tmp_path / "bare", version=7, mode="abort")
    own = {n: s for n, s in digests("old").items() if is_mtp(n, network("sparse").config)}
    assert own
    assert updater.checksums() == weight_digests(bare) | own


# --- a version in several parts -----------------------------------------------------------------


def test_an_incomplete_version_is_never_served(serving):
    updater = EngineWeightUpdater(serving)
    incomplete = {name: tensors()[name] for names in buckets(4)[1:] for name in names}
    with (
        pytest.raises(CheckpointError, match=r"is missing \(\d+ missing in total\)"),
        updater.stage_update(7, "abort") as new,
    ):
        new.add(incomplete)
    assert_serves_old_weights(serving, updater)

    def broken():
        yield WeightUpdate(7, {name: tensors()[name] for name in buckets(4)[0]})
        raise RuntimeError("the trainer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        updater.weight_publisher()(broken())
    with pytest.raises(CheckpointError, match="version 8 among those of 7"):
        updater.weight_publisher()([WeightUpdate(7, {}), WeightUpdate(8, {})])
    with pytest.raises(CheckpointError, match="no weight update"):
        updater.weight_publisher()([])
    assert_serves_old_weights(serving, updater)


def test_a_trainer_may_reuse_one_buffer_for_every_weight_update(serving):
    def gathered():
        buffer = torch.empty(max(t.numel() for t in tensors().values()))
        for name, tensor in tensors().items():
            part = buffer[: tensor.numel()].view(tensor.shape)
            yield WeightUpdate(7, {name: part.copy_(tensor)})

    updater = EngineWeightUpdater(serving)
    updater.weight_publisher()(gathered())
    assert updater.checksums() == digests("new")


@pytest.mark.parametrize("mtp", [True, False])
def test_buckets_received_while_paused_make_one_version(serving, mtp):
    updater = EngineWeightUpdater(serving)
    serving.generate_outputs(map(greedy, PROMPTS))
    serving.pause("retract")
    for names in buckets(4, mtp=mtp):
        updater.update_from_tensor([packed(names)], version=7, mode="in_place")
    assert updater._buckets is None  # no memory is held for a rollback
    serving.resume()
    if mtp:
        assert updater.checksums() == digests("new")
    assert_serves_new_weights(serving)


@pytest.mark.parametrize("versions", [(7, 7, 7), (1, 2, 7)])  # or only the last one matters
def test_a_rejected_bucket_rolls_back_the_earlier_ones(serving, versions):
    updater = EngineWeightUpdater(serving)
    serving.pause("abort")
    first, second, *_ = buckets(4)
    # The second repeats a tensor of the first, whose old value must not be lost.
    updater.update_from_tensor([packed(first)], version=versions[0], mode="in_place")
    twice = packed([*second, first[0]], **{first[0]: tensors()[first[0]] + 1})
    updater.update_from_tensor([twice], version=versions[1], mode="in_place")
    assert updater.checksums() != digests("old")
    count = len(first) + len(second)
    with pytest.raises(CheckpointError, match=f"has shape .*; {count} tensors .* rolled back"):
        updater.update_from_tensor([WRONG["has shape"]()], version=versions[2], mode="in_place")
    serving.resume()
    assert_serves_old_weights(serving, updater)


def test_served_weights_are_not_rolled_back(serving):
    updater = EngineWeightUpdater(serving)
    serving.pause("abort")
    updater.update_from_tensor([packed([HEAD])], version=7, mode="in_place")
    serving.resume()
    serving.generate_output(greedy(PROMPT))
    serving.pause("abort")
    with pytest.raises(CheckpointError) as error:
        updater.update_from_tensor([WRONG["pickle"]()], version=8, mode="in_place")
    assert "rolled back" not in str(error.value)
    assert serving.version == 7
    assert updater.checksums()[HEAD] == digests("new")[HEAD]
    serving.resume()


def test_without_a_second_copy_the_engine_stays_paused_until_the_version_is_complete(serving):
    updater = EngineWeightUpdater(serving, in_place_buckets=True)
    with (
        pytest.raises(CheckpointError, match="the engine is paused"),
        updater.stage_update(7, "in_place") as new,
    ):
        new.add({HEAD: tensors()[HEAD]})
    assert serving.stats().paused
    updater.update_from_model(other(), version=7, mode="in_place")
    serving.resume()
    assert_serves_new_weights(serving)
    with (
        pytest.raises(CheckpointError, match="unexpected tensor"),
        updater.stage_update(8, "in_place") as new,
    ):
        new.add({"no.such": torch.ones(2)})
    assert not serving.stats().paused  # nothing was written


# --- version labels and values ------------------------------------------------------------------


def test_clients_get_their_own_version_labels_back():
    labels = WeightVersionLabels()
    labels_in = ["default", "1", "step-40", "7", "step-40", "٣", ""]
    numbers = [labels.version_of(each, newest=0) for each in labels_in]
    assert [labels.label_of(number) for number in numbers] == labels_in
    assert numbers[2] == numbers[4]
    assert len(set(numbers)) == len(set(labels_in))
    assert labels.version_of("12", newest=3) == 12


def test_get_weights_by_name_returns_the_first_values(serving):
    updater = EngineWeightUpdater(serving)
    expected = network("sparse").head.weight.flatten()[:5].tolist()
    assert updater.get_weights_by_name(HEAD, 5) == expected
    with pytest.raises(CheckpointError, match="tensor 'x' not found"):
        updater.get_weights_by_name("x", 5)
    with pytest.raises(CheckpointError, match="got -1"):
        updater.get_weights_by_name(HEAD, -1)


def test_mismatched_weights_are_listed(serving):
    updater = EngineWeightUpdater(serving)
    assert updater.mismatched(dict(iter_released_tensors(network("sparse")))) == []
    given = dict(iter_released_tensors(copy_of(network("sparse"))))
    given[HEAD][3, 1] += 1.0
    given["of another network"] = torch.zeros(1)
    assert updater.mismatched(given) == [HEAD]
    assert updater.mismatched({}) == []
