"""GSM8K for training; the same as `paceline data gsm8k`.

python examples/data_preprocess/gsm8k.py --input DIR_OR_FILE --output DIR
Without files of your own, `--local_save_dir DIR` alone takes them from the hub.
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "gsm8k", *sys.argv[1:]]))
