"""Builds the documentation site from the Markdown of this repository, for reading offline.

python -m tests.site [--out out/site] [--pictures FOLDER]

A warning of the generator (a broken link, a page in no list) is an error. --pictures takes pictures of some pages,
wide and narrow, light and dark, for a human to check; they need chromium.
`pip install -r requirements/site.txt` first.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tests import browser

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "docs" / "site"
SHOWN = ("README", "docs/run", "evidence/benchmarks")
WIDTHS = (1280, 400)
DEADLINE_S = 600


def build(out: Path) -> None:
    """Write the site into the folder `out`. Raises CalledProcessError at a warning."""
    from examples.course import notebooks
    from tests import reference

    reference.write()
    notebooks.write()
    how = ["-q", "-W", "--keep-going", "-E", "-c", str(CONF), "-d", str(out / ".doctrees"), "-b", "html"]
    subprocess.run([sys.executable, "-m", "sphinx", *how, str(ROOT), str(out)], check=True, timeout=DEADLINE_S)
    shutil.rmtree(out / ".doctrees")
    (out / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')


def take_pictures(out: Path, folder: Path) -> list[Path]:
    if browser.find() is None:
        sys.exit(f"the site is built, but without pictures: {browser.NO_BROWSER}")
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    for page in SHOWN:
        for width in WIDTHS:
            for is_dark in (False, True):
                picture = folder / f"{page.replace('/', '_')}_{width}{'_dark' if is_dark else ''}.png"
                browser.show((out.resolve() / f"{page}.html").as_uri(), width, 1000, picture, is_dark)
                taken.append(picture)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "site")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    try:
        build(args.out)
    except subprocess.CalledProcessError:
        sys.exit("the site has warnings (above); mend them, or install what requirements/site.txt lists")
    print(f"open {args.out / 'index.html'}")
    if args.pictures is not None:
        print(*take_pictures(args.out, args.pictures), sep="\n")


if __name__ == "__main__":
    main()
