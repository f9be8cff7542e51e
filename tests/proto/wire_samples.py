"""One message of each kind with every field set, and the file that freezes their bytes.

    python -m tests.proto.wire_samples       adds what golden_v1.json does not have yet

An entry is the kind's name, and a number if the kind gained fields later. None is ever changed:
peers of that version send those bytes, so they must stay readable. A change that must break them
is a new protocol version, with a file of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import Message

from kvpool.proto import wire_pb2 as wire

GOLDEN = Path(__file__).with_name("golden_v1.json")
ENVELOPES: dict[str, type[Message]] = {"Request": wire.Request, "Response": wire.Response}
_F = FieldDescriptorProto


def kinds(envelope: str) -> list[str]:
    """Names of the kinds of Request or Response."""
    return [field.name for field in ENVELOPES[envelope].DESCRIPTOR.oneofs_by_name["body"].fields]


def fields(message: Message) -> list[FieldDescriptorProto]:
    """The fields of `message` as the schema declares them."""
    declared = DescriptorProto()
    message.DESCRIPTOR.CopyToProto(declared)
    return list(declared.field)


def is_nested(message: Message) -> bool:
    """Whether it holds repeated fields or other messages: columns do neither."""
    return any(f.label == _F.LABEL_REPEATED or f.type == _F.TYPE_MESSAGE for f in fields(message))


def fill(message: Message) -> None:
    """Gives every field a value of its own that is not the default."""
    for field in fields(message):
        target = getattr(message, field.name)
        if field.type == _F.TYPE_MESSAGE:
            many = field.label == _F.LABEL_REPEATED
            for one in (target.add(), target.add()) if many else (target,):
                fill(one)
        elif field.label == _F.LABEL_REPEATED:
            target.extend([field.name, "é"])
        else:
            setattr(message, field.name, _value(field))


def _value(field: FieldDescriptorProto) -> Any:
    return {
        _F.TYPE_STRING: f"{field.name} é",
        _F.TYPE_BYTES: field.name.encode() + b"\0\xff",
        _F.TYPE_BOOL: True,
        _F.TYPE_FLOAT: field.number + 0.25,
        _F.TYPE_INT32: -field.number,
        _F.TYPE_UINT32: (1 << 31) + field.number,
        _F.TYPE_UINT64: (1 << 63) + field.number,
    }[field.type]


def body(envelope: str, kind: str, *, filled: bool = True) -> Message:
    """The message of `kind` alone."""
    message: Message = getattr(ENVELOPES[envelope](), kind)
    alone = type(message)()
    if filled:
        fill(alone)
    return alone


def sample(envelope: str, kind: str) -> Message:
    """The Request or Response with id 300 around it."""
    values: dict[str, Any] = {"id": 300, kind: body(envelope, kind)}
    return ENVELOPES[envelope](**values)


def load() -> dict[str, dict[str, dict[str, str]]]:
    """envelope → entry → text and hex."""
    golden: dict[str, dict[str, dict[str, str]]] = json.loads(GOLDEN.read_text("utf-8"))
    return golden


if __name__ == "__main__":
    frozen = load() if GOLDEN.exists() else {}
    for envelope in ENVELOPES:
        entries = frozen.setdefault(envelope, {})
        for kind in kinds(envelope):
            message = sample(envelope, kind)
            raw = message.SerializeToString(deterministic=True).hex()
            if raw not in (entry["hex"] for entry in entries.values()):
                name = kind if kind not in entries else f"{kind} {len(entries)}"
                text = text_format.MessageToString(message, as_utf8=True, as_one_line=True)
                entries[name] = {"text": text, "hex": raw}
    GOLDEN.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n", "utf-8")
