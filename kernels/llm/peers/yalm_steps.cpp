// yalm's engine, asked for tokens one after another from a position on: its own program would run a prompt of
// thousands of tokens first. Usage: yalm_steps FILE FIRST COUNT TURNS; prints the seconds of a token, a line a turn.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "model.h"
#include "sampler.h"

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const int first = atoi(argv[2]), count = atoi(argv[3]), turns = atoi(argv[4]);
    YALMData data;
    if (data.from_file(argv[1]) != 0) return 1;
    Model model(data, 4096);
    InferenceState state(model.config);
    Sampler sampler(model.config, 1);
    model.cuda();
    state.cuda();
    for (int turn = -1; turn < turns; turn++) { // the first one warms up
        const auto begin = std::chrono::steady_clock::now();
        int token = 1;
        for (int i = 0; i < count; i++) {
            model.forward(state, token, first + i);
            token = sampler.sample(state, 0.0f);
        }
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
        if (turn >= 0) printf("token %.9f\n", taken.count() / count);
    }
}
