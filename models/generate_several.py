"""Several texts from one command: python -m models.generate FOLDER --prompt "..." --prompt "..." """

import time


def show(model, tokens, prompts, starts, max_tokens, seed, chat, sampling):
    """Write all texts at once, print each when it has ended, and then what all of them took. Returns the exit code, 0.

    starts  token ids of each prompt;  seed  of each text, as it would be alone; None: new ones
    """
    seeds = None if seed is None else [seed] * len(starts)
    texts = [[] for _ in starts]
    begin = last = time.perf_counter()
    stopped = False
    try:
        for number, token in model.generate_several(starts, max_tokens, **sampling, seeds=seeds):
            texts[number].append(token)
            last = time.perf_counter()
    except KeyboardInterrupt:
        stopped = True
    for number, (prompt, written) in enumerate(zip(prompts, texts), 1):
        print(f"[{number}] {'' if chat else prompt}{tokens.decode(written)}\n")
    count = sum(map(len, texts))
    rate = " on the SIMT machine: it has no times" if model.simulated else f", {count / (last - begin):,.1f} tokens/s"
    print(f"written     {count} tokens of {len(texts)} texts{rate if count else ''}{' (stopped)' * stopped}")
    return 0
