"""Bench `weights`: bytes, loss and speed of compressed weights, on real models.

Parts:

    bytes     of the decoder layers' linear weights in every format and by other packages, as they are and half pruned
              by magnitude, against dense 16-bit bytes (of fp8: 8-bit ones) and the entropy bound
    sizes     bytes in our formats after each way of pruning; perplexity
    decode    GB/s of dense output from memory, on one core and on two, beside a plain copy and zstd
    errors    loss with bit errors in stored weights and in K and V, with and without a correcting code
    gpu       GB/s of dense output on a GPU, beside a copy in its memory
    loading   dense tensors from the disk, compressed and not: does the time shrink as the bytes do?
    forward   a pass of a model of OPT-1.3B's shape with its layers on disk, under a cap of memory, beside accelerate

Rates of the disk and of a copy in memory are of the same run.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from nearflash.abi.errors import CommandError
from nearflash.bench.options import Option, check_choices
from nearflash.bench.weights import decode, errors, forward, gpu, loading, sizes
from nearflash.weights.pretrained import SMOLLM2

__all__ = ["run"]

PARTS = BYTES, SIZES, DECODE, ERRORS, GPU, LOADING, FORWARD = (
    "bytes",
    "sizes",
    "decode",
    "errors",
    "gpu",
    "loading",
    "forward",
)


def run(
    parts: Annotated[Collection[str], Option("Measure these parts.", many=True, choices=PARTS)] = PARTS,
    models: Annotated[
        Sequence[str], Option("Measure the models of these folders, or smollm2.", many=True, metavar="DIR")
    ] = (SMOLLM2,),
    texts: Annotated[
        Sequence[Path],
        Option(
            "UTF-8 files for calibration and perplexity (default: Python's manual).", Path, many=True, metavar="FILE"
        ),
    ] = (),
    windows: Annotated[int, Option("Calibrate on so many windows of 512 tokens.", int, metavar="N")] = 32,
    format: Annotated[str | None, Option("Measure this format alone.", choices=sizes.FORMATS)] = None,
    dtype: Annotated[str | None, Option("Measure this dtype alone.", choices=sizes.DTYPE_NAMES)] = None,
    path: Annotated[Path, Option("Use the disk of this folder.", Path, metavar="FOLDER")] = Path(),
) -> Iterator[dict[str, Any]]:
    """Rows of the `parts`. Raises CommandError for others, for texts that are too short, and for a folder that is none.

    A row of a model that is not there has the key `skipped`.
    """
    check_choices("parts", parts, PARTS)
    if windows < 1:
        raise CommandError(f"windows must be at least 1, not {windows}")
    if not path.is_dir():
        raise CommandError(f"path must be a folder on the disk to measure, not {str(path)!r}")
    formats = sizes.FORMATS if format is None else (format,)
    dtypes = sizes.DTYPE_NAMES if dtype is None else (dtype,)
    measures = {BYTES: sizes.measure_bytes, SIZES: sizes.measure, DECODE: decode.measure, ERRORS: errors.measure}
    for part, measure in measures.items():
        for model in models if part in parts else ():
            settings = sizes.SizesSettings(formats, dtypes, tuple(texts), windows, path)
            try:
                yield from ({"part": part, "model": Path(model).name, **row} for row in measure(model, settings))
            except sizes.MissingModelError as error:
                yield {"part": part, "model": Path(model).name, "skipped": str(error)}
    if GPU in parts:
        yield from ({"part": GPU, **row} for row in gpu.measure())
    if LOADING in parts or FORWARD in parts:
        with forward.large_model(path) as folders:
            if LOADING in parts:
                yield from ({"part": LOADING, **row} for row in loading.measure(folders, path))
            if FORWARD in parts:
                yield from ({"part": FORWARD, **row} for row in forward.measure(folders, path))
