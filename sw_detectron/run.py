"""Runs any Detectron2 script with Switchable Whitening known to it:

    python -m sw_detectron.run SCRIPT [the script's own arguments]

The script then finds MODEL.SW and the other keys of this package in every config that `get_cfg`
returns, the norms in `get_norm`, and the backbones and data sets in their registries; its optimizer
treats SW as a norm. After `--config-file` it may be given the bare name of a config that comes with
the package. OUTPUT_DIR is by default `output/` plus the name of the config.
"""

import os
import sys

import detectron2.engine.defaults
import detectron2.solver
from detectron2.config import defaults

import sw_detectron
from sw_detectron.cli import fail
from sw_detectron.config import default_output_dir, find_config
from sw_detectron.engine.optimizer import build_optimizer

_SCRIPT = "SW_DETECTRON_SCRIPT"


def _prepare(arguments: list[str]) -> None:
    """Make `sys.argv` and `sys.path` what Python makes them for a script that it starts itself."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__.strip())
    sys.argv = arguments
    if not os.path.isfile(arguments[0]):
        raise sw_detectron.UserError("there is no such script")
    for i, before, name in _config_files(arguments):
        arguments[i] = f"{before}{find_config(name)}"
    os.environ[_SCRIPT] = os.path.abspath(arguments[0])
    sys.path.insert(0, os.path.dirname(os.environ[_SCRIPT]))


def _config_files(arguments: list[str]) -> list[tuple[int, str, str]]:
    """Where a config is named, as `--config-file NAME` or `--config-file=NAME`: the argument's
    index, what stands in it before the name, and the name."""
    flag = "--config-file"
    return [
        (i, "", name) if before == flag else (i, f"{flag}=", name.removeprefix(f"{flag}="))
        for i, (before, name) in enumerate(zip(["", *arguments], arguments))
        if before == flag or name.startswith(f"{flag}=")
    ]


def _run() -> None:
    """Run the script inside this module, which is the main module.

    A process that the script spawns imports the main module by its name before it calls a function
    of it. By running here, and not in a module that `runpy` makes from the script's file, that
    process comes to this line too and so knows SW. It learns the script's name from the
    environment, since the import replaces its `sys.argv[0]`.
    """
    sw_detectron.add_sw_config(defaults._C)
    for _, _, path in _config_files(sys.argv):
        defaults._C.OUTPUT_DIR = default_output_dir(path)
    # Detectron2's own knows a fixed list of norms. Scripts call it, or leave it to DefaultTrainer.
    detectron2.solver.build_optimizer = build_optimizer
    detectron2.engine.defaults.build_optimizer = build_optimizer
    script = os.environ[_SCRIPT]
    main = sys.modules[__name__].__dict__
    main |= {"__file__": script, "__doc__": None}
    with open(script, "rb") as file:
        exec(compile(file.read(), script, "exec"), main)


if __name__ == "__main__":
    try:
        _prepare(sys.argv[1:])
        _run()
    except sw_detectron.UserError as error:
        fail(error)
elif __name__ == "__mp_main__":
    _run()
