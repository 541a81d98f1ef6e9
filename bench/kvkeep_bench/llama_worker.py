"""llama.cpp's own server, in a process of its own, whose Python needs nothing but xllamacpp.

    python llama_worker.py MODEL.gguf SLOTS SLOT_TOKENS THREADS FOLDER

Prints two lines, what it is and the server's address, and ends when its standard input does.
``FOLDER`` takes what slots save.
"""

import sys

import xllamacpp


def main() -> None:
    """Serve until nobody listens any more."""
    model, slots, slot_tokens, threads, folder = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = int(slots)
    params.n_ctx = int(slots) * int(slot_tokens)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.slot_save_path = folder if folder.endswith("/") else folder + "/"
    params.n_threads_http = int(slots) + 2
    params.verbosity = 2
    server = xllamacpp.Server(params)
    print(f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip(' |')}")
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
