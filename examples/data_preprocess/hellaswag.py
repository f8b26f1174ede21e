"""HellaSwag for training; the same as `paceline data hellaswag`.

python examples/data_preprocess/hellaswag.py --input DIR_OR_FILE --output DIR
Without files of your own, `--local_save_dir DIR` alone takes them from the hub.
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "hellaswag", *sys.argv[1:]]))
