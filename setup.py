"""Build step: configs, deployments and constraints.txt are copied into the package, so that a wheel is complete."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    """`build_py` that also copies the files that `tasks.shipped` looks for."""

    def run(self) -> None:
        """Build the packages, then copy; an editable install reads the checkout's own folders."""
        super().run()
        if self.editable_mode:
            return
        root, target = Path(__file__).resolve().parent, Path(self.build_lib) / "tasks" / "shipped"
        for folder in ("configs", "deployments"):
            for path in sorted((root / folder).rglob("*")):
                if path.is_file() and path.suffix != ".pyc":
                    place = target / path.relative_to(root)
                    self.mkpath(str(place.parent))
                    self.copy_file(str(path), str(place))
        self.copy_file(str(root / "constraints.txt"), str(target / "constraints.txt"))


setup(cmdclass={"build_py": BuildWithShippedFiles})
