"""Builds the documentation site from the Markdown of this repository, for reading offline.

python -m docs.site.build [--out out/site]

A warning of the generator (a broken link, a page in no list) is an error. `pip install -r requirements/site.txt` first.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONF = Path(__file__).parent
DEADLINE_S = 600


def build(out: Path) -> None:
    """Write the site into the folder `out`. Raises CalledProcessError at a warning."""
    from docs.site import reference
    from examples.course import notebooks

    reference.write()
    notebooks.write()
    how = ["-q", "-W", "--keep-going", "-E", "-c", str(CONF), "-d", str(out / ".doctrees"), "-b", "html"]
    subprocess.run([sys.executable, "-m", "sphinx", *how, str(ROOT), str(out)], check=True, timeout=DEADLINE_S)
    shutil.rmtree(out / ".doctrees")
    (out / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "site")
    args = parser.parse_args()
    try:
        build(args.out)
    except subprocess.CalledProcessError:
        sys.exit("the site has warnings (above); mend them, or install what requirements/site.txt lists")
    print(f"open {args.out / 'index.html'}")


if __name__ == "__main__":
    main()
