"""Chakra's messages: the nodes of a binary trace, each behind its length, decoded with the protobuf package.

The schema is built here, from descriptors, and has only the fields that the importer reads: what protoc generates is
bound to the release of protobuf that generated it, and a list that the schema does not name stays a run of bytes.  The
lengths are read here, because protobuf's own reader takes a length of any size.

Measured with a trace of 50 MB (163,000 nodes): 1.0 s, where decoding in Python took 5.0 s.  A node of nothing but empty
attributes takes 33 bytes of memory for each of its own: 0.5 GiB for the largest that is decoded.

Source: schema/protobuf/et_def.proto of Chakra 1.0 (schema 0.0.4), and the encoding guide of Protocol Buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from railscope.agent.imports.sources import SourceStream

LARGEST_MESSAGE_BYTES: Final = 1 << 24
_LONGEST_VARINT: Final = 10
_PACKAGE: Final = "railscope.chakra"
_ATTRIBUTE_VALUES: Final = {
    "double": 3,
    "float": 5,
    "int32": 7,
    "int64": 9,
    "uint32": 11,
    "uint64": 13,
    "sint32": 15,
    "sint64": 17,
    "fixed32": 19,
    "fixed64": 21,
    "sfixed32": 23,
    "sfixed64": 25,
    "bool": 27,
    "string": 29,
}
"""Field numbers by type; those between are lists, which the importer does not read."""


class BrokenMessage(ValueError):
    """The bytes are not a message; the text says why."""


def decode_node(content: bytes) -> Any:
    """A node of a Chakra trace: `name`, `type`, `start_time_micros`, `duration_micros`, `inputs.values`, `attr`; 0 or
    empty: not said.

    Raises:
        BrokenMessage: it is no message.
    """
    return _decoded(_NODE, content)


def decode_metadata(content: bytes) -> Any:
    """The first message of a Chakra trace, which describes it: `attr`.

    Raises:
        BrokenMessage: it is no message.
    """
    return _decoded(_METADATA, content)


def attribute_values(attributes: Any) -> dict[str, Any]:
    """Attributes of a Chakra node: numbers, texts and truth values by name; lists are left out."""
    return {one.name: getattr(one, kind) for one in attributes if (kind := one.WhichOneof("value")) is not None}


def split_messages(stream: SourceStream) -> Iterator[bytes]:
    """The protobuf messages of a Chakra trace, which each stand behind their length.

    Raises:
        BrokenMessage: a length cannot be, or the file ends in the middle of a message.
    """
    while (length := _length(stream)) is not None:
        if length > LARGEST_MESSAGE_BYTES:
            raise BrokenMessage(f"a message of {length} bytes")
        content = stream.read(length)
        if len(content) < length:
            raise BrokenMessage("the file ends in the middle of a message")
        yield content


def _length(stream: SourceStream) -> int | None:
    value = 0
    for position in range(_LONGEST_VARINT):
        letter = stream.read(1)
        if not letter:
            if position:
                raise BrokenMessage("the file ends in the middle of a length")
            return None
        value |= (letter[0] & 0x7F) << (7 * position)
        if letter[0] < 0x80:
            return value
    raise BrokenMessage("a malformed length")


def _decoded(message: Any, content: bytes) -> Any:
    try:
        return message.FromString(content)
    except DecodeError as error:
        raise BrokenMessage(str(error)) from None


def _message_classes() -> tuple[Any, Any]:
    """Node and GlobalMetadata."""
    file = descriptor_pb2.FileDescriptorProto(name="railscope/chakra.proto", package=_PACKAGE, syntax="proto3")
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    _add_field(attribute, "name", 1, "string")
    for kind, number in _ATTRIBUTE_VALUES.items():
        _add_field(attribute, f"{kind}_val", number, kind).oneof_index = 0
    node = file.message_type.add(name="Node")
    _add_field(node, "name", 2, "string")
    # An enum of Chakra's; unsigned, so that no file says a number that the importer gave a meaning of its own.
    _add_field(node, "type", 3, "uint32")
    _add_field(node, "start_time_micros", 6, "uint64")
    _add_field(node, "duration_micros", 7, "uint64")
    inputs = file.message_type.add(name="IOInfo")
    _add_field(inputs, "values", 1, "string")
    _add_field(node, "inputs", 8, "message").type_name = f".{_PACKAGE}.IOInfo"
    _add_attributes(node, 10)
    metadata = file.message_type.add(name="GlobalMetadata")
    _add_attributes(metadata, 2)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}"))
        for message in (node, metadata)
    ]
    return found[0], found[1]


def _add_field(message: Any, name: str, number: int, kind: str) -> Any:
    field = message.field.add(name=name, number=number)
    field.type = getattr(field, f"TYPE_{kind.upper()}")
    field.label = field.LABEL_OPTIONAL
    return field


def _add_attributes(message: Any, number: int) -> None:
    field = _add_field(message, "attr", number, "message")
    field.type_name = f".{_PACKAGE}.AttributeProto"
    field.label = field.LABEL_REPEATED


_NODE, _METADATA = _message_classes()
