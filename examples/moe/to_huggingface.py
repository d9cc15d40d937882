"""Write the model of a consolidated checkpoint as a folder of Hugging Face, by plain Lightning.

Example:
    python -m examples.moe.to_huggingface mixture.ckpt mixture
"""

import argparse
import sys

from examples.huggingface.model import CausalLM


def main() -> int:
    """Load the module from the checkpoint, and save its model in the folder."""
    parser = argparse.ArgumentParser("python -m examples.moe.to_huggingface")
    parser.add_argument("checkpoint", help="file that lightning-dist checkpoint consolidate has written")
    parser.add_argument("folder", help="folder to write")
    options = parser.parse_args()
    CausalLM.load_from_checkpoint(options.checkpoint, map_location="cpu", weights_only=True).model.save_pretrained(
        options.folder
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
