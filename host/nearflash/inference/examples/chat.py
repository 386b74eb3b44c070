"""A conversation whose history stays on flash: each turn brings only its own tokens.

python -m nearflash.inference.examples.chat --model smollm2
"""

import argparse
import sys
from collections.abc import Sequence

from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.session import Session
from nearflash.inference.setup import CPU, open_engine
from nearflash.weights.pretrained import SMOLLM2

__all__ = ["main"]

POLICY = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=0.25, top_p=0.95, min_tokens=256)


def main(argv: Sequence[str] | None = None) -> int:
    """Reply to each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--device", default=CPU)
    parser.add_argument("--tokens", type=int, default=4096, help="room for the whole conversation")
    arguments = parser.parse_args(argv)
    model, tokenizer = load_model(arguments.model)
    shape = kv_shape(model)
    with open_engine(shape, POLICY, tokens=arguments.tokens, sequences=1, device=arguments.device) as engine:
        session = Session(model, tokenizer, engine)
        for line in sys.stdin:
            print(session.reply(line.strip(), max_new_tokens=100).texts[0], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
