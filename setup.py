"""Packaging. Detectron2 is not on the package registry under its name, so it is no requirement
here: importing sw_detectron checks for it and says how to get it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "sw_detectron/__init__.py").read_text())[1]

setup(
    name="sw_detectron",
    version=version,
    description="Switchable Whitening for Detectron2",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=[
        # before 2.6 a checkpoint could run code in spite of weights_only (CVE-2025-32434)
        "torch>=2.6",
        "torchvision>=0.21",
        "numpy>=1.22",
        "fvcore>=0.1.5.post20221221",
        "iopath>=0.1.9",
        "pycocotools>=2.0.6",
        "matplotlib>=3.6",
        "opencv-python-headless>=4.5",  # Detectron2's transforms and visualizer want some OpenCV
        "pillow>=9.1",
        "safetensors>=0.4",
        "tabulate>=0.8",
        "tqdm>=4.60",
    ],
    extras_require={
        "demo": ["tensorboard"],
        "robustness": ["imagecorruptions-imaug>=1.1.5"],  # tools/corruption_benchmark.py
    },
    packages=[*find_packages(include=["sw_detectron", "sw_detectron.*"]), "sw_detectron.configs"],
    package_dir={"sw_detectron.configs": "configs"},
    package_data={
        "sw_detectron": ["py.typed"],
        "sw_detectron.configs": ["*/*.yaml", "*/*.py", "*/*.txt"],
    },
)
