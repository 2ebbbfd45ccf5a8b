"""New weights from every source, whole or in buckets, right or wrong, while requests run."""

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
    assert_new,
    assert_untouched,
    buckets,
    packed,
    sums,
    tensors,
)
from tests.model.networks import born, latent_config

MODES = ["abort", "retract", "in_place"]


@pytest.fixture
def serving():
    with engine(copy_of(network("sparse"))) as found:
        yield found
        assert found.audit() == []


# --- while requests run -------------------------------------------------------------------------


def from_disk(reload, folder, mode):
    save_pretrained(other(), folder)
    reload.update_from_disk(str(folder), version=7, mode=mode)


def from_bytes(reload, _, mode):
    reload.update_from_tensor([packed(names) for names in buckets(2)], version=7, mode=mode)


def from_network(reload, _, mode):
    reload.update_from_model(other(), version=7, mode=mode)


def published(reload, _, mode):
    parts = (WeightUpdate(7, {n: tensors()[n] for n in names}) for names in buckets(3))
    reload.weight_publisher(mode)(parts)


def while_running(serving, change):
    """The answers to requests that had all begun, and not ended, before `change` was called."""

    async def main():
        begun = [asyncio.Event() for _ in PROMPTS]

        async def reply(i):
            async for delta in serving.stream(greedy(PROMPTS[i], 24)):
                begun[i].set()
                if delta.output is not None:
                    return delta.output

        tasks = [asyncio.create_task(reply(i)) for i in range(len(PROMPTS))]
        for event in begun:
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
    reload = EngineWeightUpdater(serving, in_place_buckets=in_place_buckets)
    after = 0

    def change():
        serving.pause("in_place")  # else they might be done before the weights have come
        source(reload, tmp_path / "new", mode)
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
    assert reload.checksums() == sums("new")
    assert reload.last_update.version == 7
    assert reload.last_update.tensors == len(tensors())
    assert reload.last_update.bytes == sum(t.nbytes for t in tensors().values())
    assert_new(serving)


@pytest.mark.parametrize("in_place_buckets", [False, True])
def test_an_engine_that_was_not_paused_runs_on(serving, in_place_buckets):
    reload, running = EngineWeightUpdater(serving, in_place_buckets=in_place_buckets), []
    answers = while_running(
        serving,
        lambda: running.append(reload.update_from_model(other(), version=7, mode="retract")),
    )
    assert running == [sum(answer.preemptions for answer in answers)]
    assert [len(answer.completion.token_ids) for answer in answers] == [24] * len(PROMPTS)
    assert reload.last_update.paused_s > 0
    assert not serving.stats().paused
    assert_new(serving)


# --- what is refused ----------------------------------------------------------------------------


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
def test_wrong_tensors_change_nothing_and_cost_no_cached_page(serving, why):
    reload, first = EngineWeightUpdater(serving), "model.embed_tokens.weight"
    serving.generate_output(greedy(PROMPT))
    with pytest.raises(CheckpointError, match=why):
        reload.update_from_tensor([packed([first]), WRONG[why]()], version=7, mode="abort")
    assert_untouched(serving, reload)
    assert serving.generate_output(greedy(PROMPT)).cached_tokens == 16
    assert reload.last_update is None


def test_a_tensor_that_comes_twice_is_refused(serving):
    reload = EngineWeightUpdater(serving)
    with pytest.raises(CheckpointError, match=f"'{HEAD}' was sent twice"):
        reload.update_from_tensor([packed([HEAD]), packed([HEAD])], version=7, mode="in_place")
    assert_untouched(serving, reload)


def test_a_folder_of_another_network_is_refused(serving, tmp_path):
    reload = EngineWeightUpdater(serving)
    turned = latent_config().rope.model_copy(update={"theta": 200.0})
    save_pretrained(born(latent_config(rope=turned), seed=11), tmp_path / "turned")
    with pytest.raises(CheckpointError, match=r"'rope' is .*200.* it is .*100"):
        reload.update_from_disk(tmp_path / "turned", version=7, mode="abort")
    with pytest.raises(CheckpointError, match="folder not found"):
        reload.update_from_disk(tmp_path / "nowhere", version=7, mode="abort")
    (tmp_path / "turned" / "model.safetensors").rename(tmp_path / "turned" / "model.bin")
    with pytest.raises(CheckpointError, match=r"pickle|rope"):
        reload.update_from_disk(tmp_path / "turned", version=7, mode="abort")
    assert_untouched(serving, reload)


@pytest.mark.parametrize("in_place_buckets", [False, True])
def test_a_folder_without_its_mtp_layer_leaves_the_engines_own(serving, tmp_path, in_place_buckets):
    config = latent_config(mtp=None)
    bare = born(config, seed=3)
    save_pretrained(bare, tmp_path / "bare")
    reload = EngineWeightUpdater(serving, in_place_buckets=in_place_buckets)
    reload.update_from_disk(tmp_path / "bare", version=7, mode="abort")
    own = {n: s for n, s in sums("old").items() if is_mtp(n, network("sparse").config)}
    assert own
    assert reload.checksums() == weight_digests(bare) | own


# --- a version in several parts -----------------------------------------------------------------


def test_half_a_version_is_never_served(serving):
    reload = EngineWeightUpdater(serving)
    most = {name: tensors()[name] for names in buckets(4)[1:] for name in names}
    with (
        pytest.raises(CheckpointError, match=r"is missing, one of \d+"),
        reload.stage_update(7, "abort") as new,
    ):
        new.add(most)
    assert_untouched(serving, reload)

    def broken():
        yield WeightUpdate(7, {name: tensors()[name] for name in buckets(4)[0]})
        raise RuntimeError("the trainer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        reload.weight_publisher()(broken())
    with pytest.raises(CheckpointError, match="version 8 among those of 7"):
        reload.weight_publisher()([WeightUpdate(7, {}), WeightUpdate(8, {})])
    with pytest.raises(CheckpointError, match="no weight update"):
        reload.weight_publisher()([])
    assert_untouched(serving, reload)


def test_a_trainer_may_gather_every_parcel_in_the_same_memory(serving):
    def gathered():
        room = torch.empty(max(t.numel() for t in tensors().values()))
        for name, tensor in tensors().items():
            part = room[: tensor.numel()].view(tensor.shape)
            yield WeightUpdate(7, {name: part.copy_(tensor)})

    reload = EngineWeightUpdater(serving)
    reload.weight_publisher()(gathered())
    assert reload.checksums() == sums("new")


@pytest.mark.parametrize("mtp", [True, False])
def test_buckets_that_come_while_the_engine_pauses_make_one_version(serving, mtp):
    reload = EngineWeightUpdater(serving)
    serving.generate_outputs(map(greedy, PROMPTS))
    serving.pause("retract")
    for names in buckets(4, mtp=mtp):
        reload.update_from_tensor([packed(names)], version=7, mode="in_place")
    assert reload._buckets is None  # no memory is held for a way back that nobody needs
    serving.resume()
    if mtp:
        assert reload.checksums() == sums("new")
    assert_new(serving)


@pytest.mark.parametrize("versions", [(7, 7, 7), (1, 2, 7)])  # or the last alone says which
def test_a_bucket_that_is_refused_takes_those_before_it_back(serving, versions):
    reload = EngineWeightUpdater(serving)
    serving.pause("abort")
    first, second, *_ = buckets(4)
    # The second has a tensor of the first again, whose old value must not be lost.
    reload.update_from_tensor([packed(first)], version=versions[0], mode="in_place")
    twice = packed([*second, first[0]], **{first[0]: tensors()[first[0]] + 1})
    reload.update_from_tensor([twice], version=versions[1], mode="in_place")
    assert reload.checksums() != sums("old")
    count = len(first) + len(second)
    with pytest.raises(CheckpointError, match=f"has shape .*; {count} tensors .* rolled back"):
        reload.update_from_tensor([WRONG["has shape"]()], version=versions[2], mode="in_place")
    serving.resume()
    assert_untouched(serving, reload)


def test_what_was_served_is_not_taken_back(serving):
    reload = EngineWeightUpdater(serving)
    serving.pause("abort")
    reload.update_from_tensor([packed([HEAD])], version=7, mode="in_place")
    serving.resume()
    serving.generate_output(greedy(PROMPT))
    serving.pause("abort")
    with pytest.raises(CheckpointError) as refused:
        reload.update_from_tensor([WRONG["pickle"]()], version=8, mode="in_place")
    assert "rolled back" not in str(refused.value)
    assert serving.version == 7
    assert reload.checksums()[HEAD] == sums("new")[HEAD]
    serving.resume()


def test_without_a_second_copy_the_engine_waits_for_a_whole_version(serving):
    reload = EngineWeightUpdater(serving, in_place_buckets=True)
    with (
        pytest.raises(CheckpointError, match="the engine is paused"),
        reload.stage_update(7, "in_place") as new,
    ):
        new.add({HEAD: tensors()[HEAD]})
    assert serving.stats().paused
    reload.update_from_model(other(), version=7, mode="in_place")
    serving.resume()
    assert_new(serving)
    with (
        pytest.raises(CheckpointError, match="unexpected tensor"),
        reload.stage_update(8, "in_place") as new,
    ):
        new.add({"no.such": torch.ones(2)})
    assert not serving.stats().paused  # nothing was written


# --- names of versions, and values --------------------------------------------------------------


def test_a_client_gets_its_own_name_of_a_version_back():
    labels = WeightVersionLabels()
    said = ["default", "1", "step-40", "7", "step-40", "٣", ""]
    numbers = [labels.version_of(each, newest=0) for each in said]
    assert [labels.label_of(number) for number in numbers] == said
    assert numbers[2] == numbers[4]
    assert len(set(numbers)) == len(set(said))
    assert labels.version_of("12", newest=3) == 12


def test_values_are_the_first_numbers(serving):
    reload = EngineWeightUpdater(serving)
    expected = network("sparse").head.weight.flatten()[:5].tolist()
    assert reload.get_weights_by_name(HEAD, 5) == expected
    with pytest.raises(CheckpointError, match="tensor 'x' not found"):
        reload.get_weights_by_name("x", 5)
    with pytest.raises(CheckpointError, match="got -1"):
        reload.get_weights_by_name(HEAD, -1)


def test_what_is_served_otherwise_than_given_is_named(serving):
    reload = EngineWeightUpdater(serving)
    assert reload.mismatched(dict(iter_released_tensors(network("sparse")))) == []
    given = dict(iter_released_tensors(copy_of(network("sparse"))))
    given[HEAD][3, 1] += 1.0
    given["of another network"] = torch.zeros(1)
    assert reload.mismatched(given) == [HEAD]
    assert reload.mismatched({}) == []
