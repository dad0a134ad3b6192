"""Layouts: which rank holds which box of which field, and where in its pages.

The room has only values and pure functions, and imports no torch, grpc or NIXL.
"""

from restow.broker.layout.check_whole import check_layout
from restow.broker.layout.schema import digest
from restow.broker.layout.span import Box, Span
from restow.broker.layout.token_class import ALL_TOKENS, TokenClass
from restow.broker.layout.values import (
    DType,
    Field,
    Kind,
    Layout,
    Model,
    ModelIdentity,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
)

__all__ = [
    "ALL_TOKENS",
    "Box",
    "DType",
    "Field",
    "Kind",
    "Layout",
    "Model",
    "ModelIdentity",
    "Projection",
    "RankLayout",
    "Region",
    "Scratch",
    "Shard",
    "Span",
    "TokenClass",
    "check_layout",
    "digest",
]
