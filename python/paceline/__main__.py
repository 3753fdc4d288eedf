"""Runs the program that comes with this package."""
import os
import sys
import sysconfig
from pathlib import Path


def main():
    # Where pip puts programs: beside this Python, for a user alone, or below `pip install --target FOLDER`.
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user"), Path(__file__).resolve().parents[1] / "bin"]
    for program in (Path(folder, "paceline") for folder in folders):
        if os.access(program, os.X_OK):
            os.execv(program, [program, *sys.argv[1:]])
    sys.exit("paceline: the program is not installed beside this package; install the wheel again with pip")


if __name__ == "__main__":
    main()
