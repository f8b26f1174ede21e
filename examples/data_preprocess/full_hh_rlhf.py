"""full-hh-rlhf for training; the same as `paceline data full_hh_rlhf`.

python examples/data_preprocess/full_hh_rlhf.py --input DIR_OR_FILE --output DIR [--for rl|sft|rm]
Without files of your own, `--local_save_dir DIR` alone takes them from the hub.
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "full_hh_rlhf", *sys.argv[1:]]))
