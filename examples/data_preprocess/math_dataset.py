"""MATH for training; the same as `paceline data math`.

python examples/data_preprocess/math_dataset.py --input DIR_OR_FILE --output DIR
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "math", *sys.argv[1:]]))
