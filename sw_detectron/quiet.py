"""Leaves out what other packages say that is not for this package's users.

Each is named by the beginning of its message: what Detectron2 and Pillow do is not theirs to mend.
"""

import logging
import warnings

for message in (
    # Detectron2 calls it the old way.
    "torch.meshgrid: in an upcoming release",
    # Pillow, of images that it reads well.
    "Image size .* could be decompression bomb",
    r"(Possibly c|C)orrupt EXIF data",
):
    warnings.filterwarnings("ignore", message)

for name, message in (
    ("torch.fx._symbolic_trace", "is_fx_tracing will return true"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
):
    logging.getLogger(name).addFilter(
        lambda record, message=message: not record.getMessage().startswith(message)
    )
