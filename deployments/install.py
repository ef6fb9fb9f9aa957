"""Installation of this checkout with the tested versions of its packages, as `python -m posttrain.install` does it.

python deployments/install.py [--extras dev,monitor]
"""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "posttrain" / "install.py"

if __name__ == "__main__":
    runpy.run_path(str(SCRIPT), run_name="__main__")
