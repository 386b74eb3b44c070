"""What a state holds beside its arrays: JSON values of the training script and of the optimizer."""

import json
from collections.abc import Mapping
from typing import Any

from nearflash.abi.errors import FormatError

__all__ = ["METADATA_BYTES", "checked_metadata"]

METADATA_BYTES = 64 << 10
"""Room for `metadata`, as JSON, in the checksum table of each slot: a scaler, a scheduler, generators' states."""


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as JSON gives it back. Raises FormatError for what is not finite JSON, or longer than METADATA_BYTES."""
    try:
        text = json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FormatError(f"metadata must be finite JSON values, not what fails with: {error}") from error
    if len(text) > METADATA_BYTES:
        raise FormatError(
            f"metadata must fit {METADATA_BYTES} bytes of JSON, not {len(text)}; keep large values elsewhere"
        )
    values: dict[str, Any] = json.loads(text)
    return values
