"""GSM8K for training; the same as `paceline data gsm8k`.

python examples/data_preprocess/gsm8k.py --input DIR_OR_FILE --output DIR
"""

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "gsm8k", *sys.argv[1:]]))
