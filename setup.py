"""Packaging: the library, and the patch sets as its data."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "ddpshim" / "__init__.py").read_text(), re.MULTILINE).group(1)

setup(
    name="ddpshim",
    version=VERSION,
    description="Robomimic-style trainers from DataParallel to DistributedDataParallel: the same experiment, faster",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.9",
    packages=["ddpshim", "ddpshim.doctor", "ddpshim.report", "ddpshim.patches"],
    package_dir={"ddpshim": "ddpshim", "ddpshim.patches": "patches"},
    package_data={"ddpshim": ["py.typed"], "ddpshim.patches": ["README.md", "*/*/*.patch", "*/*/manifest.json"]},
    install_requires=["torch>=2.1", "packaging"],
    extras_require={
        "robomimic": ["robomimic>=0.3.0"],
        "report": ["matplotlib>=3.7"],
        "test": ["pytest", "ruff", "mypy", "numpy"],
    },
)
