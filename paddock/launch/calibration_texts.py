"""Text that quantization is calibrated and evaluated with, from runs and files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    from paddock.data import FileSource, IndexedDataset, LongContextSource, SourceContext, Tokenizer
    from paddock.quant import CalibrationText, TextPurpose
    from paddock.train import TrainingRun

HELD_OUT_EVERY = 4  # every fourth text of a file is for evaluation, not for calibration
MIN_TOKENS = 2  # of a text: one to condition on and one to predict
PURPOSE_ORDER = ("calibration", "validation", "needles")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBudget:
    """How much text to use."""

    calibrate: int  # tokens
    held_out: int  # tokens
    needles: int
    length: int  # max tokens of a document


def is_run(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file()


def load_calibration_texts(
    texts: Sequence[Path], tokenizer: "Tokenizer", amounts: CalibrationBudget
) -> "list[CalibrationText]":
    """Equal shares of all runs and files; needles from the first that has any."""
    found: list[CalibrationText] = []
    for path in texts:
        requested = sum(1 for passage in found if passage.purpose == "needles")
        share = CalibrationBudget(
            calibrate=-(-amounts.calibrate // len(texts)),
            held_out=-(-amounts.held_out // len(texts)),
            needles=max(0, amounts.needles - requested),
            length=amounts.length,
        )
        read = calibration_texts_from_run if is_run(path) else calibration_texts_from_files
        found += read(path, tokenizer, share)
    return sorted(found, key=lambda passage: PURPOSE_ORDER.index(passage.purpose))


def calibration_texts_from_run(
    folder: Path, tokenizer: "Tokenizer", amounts: CalibrationBudget
) -> "list[CalibrationText]":
    """A stage's training text, its held-out text, and needles like those it was trained on."""
    from paddock.data import LongContextSource
    from paddock.train import open_corpus

    run = open_run(folder)
    corpus = open_corpus(run, tokenizer, lambda _: None)
    found = _from_split(corpus.split("train"), "calibration", amounts.calibrate, amounts.length)
    found += _from_split(corpus.split("held_out"), "validation", amounts.held_out, amounts.length)
    known = [s for s in run.settings.corpus.sources if isinstance(s, LongContextSource)]
    if known and amounts.needles:
        longest = max(known, key=lambda source: source.max_tokens)
        requested = {"count": amounts.needles, "held_out": True, "times": 1}
        begin = [tokenizer.token_to_id(token) or 0 for token in run.settings.corpus.bos_tokens]
        found += _needles(longest.model_copy(update=requested), tokenizer, begin)
    return found


def open_run(folder: Path) -> "TrainingRun":
    """The training run in a folder. Raises UserError if its recipe has no corpus."""
    from paddock.config import ConfigError, load_recipe, resolve
    from paddock.train import TrainingRun, TrainSettings

    try:
        settings = resolve(TrainSettings, load_recipe(folder / "recipe.toml", []))
    except ConfigError as error:
        why = str(error).splitlines()[0]  # the other lines have the same cause
        raise UserError(
            f"{folder}: its recipe does not name a training corpus ({why}); pass text "
            "with --calibration-data"
        ) from None
    return TrainingRun(folder=folder, corpora_dir=folder.parent / "corpora", settings=settings)


def _from_split(
    documents: "Mapping[str, IndexedDataset]", purpose: "TextPurpose", tokens: int, length: int
) -> "list[CalibrationText]":
    """Documents of all sources in turn, up to `tokens`."""
    from paddock.quant import CalibrationText

    found, seen = [], 0
    for number in range(max((len(some) for some in documents.values()), default=0)):
        for some in documents.values():
            if number >= len(some) or seen >= tokens:
                continue
            size = min(some.length(number), length)
            if size >= MIN_TOKENS:
                ids = tuple(int(token) for token in some.token_ids(number, 0, size))
                found.append(CalibrationText(ids=ids, purpose=purpose))
                seen += size
    return found


def calibration_texts_from_files(
    path: Path, tokenizer: "Tokenizer", amounts: CalibrationBudget
) -> "list[CalibrationText]":
    """Texts of a file or folder, for calibration and evaluation, and needles hidden in them."""
    from paddock.data import LongContextSource
    from paddock.quant import CalibrationText

    source, reading = _source(path), _reading(tokenizer)
    left: dict[TextPurpose, int] = {
        "calibration": amounts.calibrate,
        "validation": amounts.held_out,
    }
    found: list[CalibrationText] = []
    for number, ids in enumerate(_pieces(source, reading, tokenizer, amounts.length)):
        if all(tokens <= 0 for tokens in left.values()):
            break
        purpose: TextPurpose = (
            "validation" if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "calibration"
        )
        if left[purpose] > 0:
            found.append(CalibrationText(ids=ids, purpose=purpose))
            left[purpose] -= len(ids)
    if amounts.calibrate and not any(one.purpose == "calibration" for one in found):
        why = ", ".join(f"{reason} ({count})" for reason, count in reading.drop_counts.items())
        dropped = f"; dropped: {why}" if why else ""
        raise UserError(f"{path}: contains no document of {MIN_TOKENS} tokens or more{dropped}")
    if amounts.needles:
        hidden = LongContextSource(
            name="needles",
            task="needle",
            haystack=source,
            max_tokens=max(64, amounts.length),
            count=amounts.needles,
            held_out=True,
        )
        found += _needles(hidden, tokenizer, [])
    return found


def _reading(tokenizer: "Tokenizer") -> "SourceContext":
    from paddock.data import SourceContext

    return SourceContext(count_tokens=lambda text: len(tokenizer.encode(text, specials=False)))


def _pieces(
    source: "FileSource", reading: "SourceContext", tokenizer: "Tokenizer", length: int
) -> "Iterator[tuple[int, ...]]":
    """Token ids of the documents; long ones are split."""
    for document in source.documents(reading):
        ids = tokenizer.encode(document.text, specials=False)
        for start in range(0, len(ids), length):
            if len(ids) - start >= MIN_TOKENS:
                yield tuple(ids[start : start + length])


def _source(path: Path) -> "FileSource":
    from paddock.data import FolderSource, JsonlSource, ParquetSource

    name = path.name.lower()
    if path.is_dir():
        if any(path.glob("*.jsonl*")):
            return JsonlSource(name="text", path=str(path))
        if any(path.glob("*.parquet")):
            return ParquetSource(name="text", path=str(path))
        return FolderSource(name="text", path=str(path))
    if not path.is_file():
        raise UserError(f"{path}: file or folder not found")
    if name.endswith((".jsonl", ".jsonl.gz")):
        return JsonlSource(name="text", path=str(path))
    if name.endswith(".parquet"):
        return ParquetSource(name="text", path=str(path))
    # The name is escaped: it may contain glob characters.
    return FolderSource(name="text", path=str(path.parent), glob_patterns=(escape(path.name),))


def _needles(
    source: "LongContextSource", tokenizer: "Tokenizer", begin: list[int]
) -> "Iterator[CalibrationText]":
    from paddock.quant import CalibrationText
    from paddock.train import evaluate

    for task in source.tasks(_reading(tokenizer)):
        question = evaluate.encode_question(task, tokenizer, begin)
        answers = tuple((answer.start, answer.stop) for answer in question.answers)
        yield CalibrationText(ids=tuple(question.ids), purpose="needles", answers=answers)
