"""HellaSwag for training; the same as `paceline data hellaswag`.

python examples/data_preprocess/hellaswag.py --input DIR_OR_FILE --output DIR
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "hellaswag", *sys.argv[1:]]))
