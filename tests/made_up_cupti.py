"""An environment whose card is a program: it loads what CUDA_INJECTION64_PATH names, and tells it through a library
with CUPTI's names what a driver would tell.

    bin/work LIBRARY CUBIN KERNEL ...    "loads" CUBIN if the library holds its bytes, launches KERNEL, and prints a
                                         sum; else says what CUDA says where code is missing, and fails
"""

import subprocess
from pathlib import Path

from fat_libraries import cubins, parts

from lab import fatbin
from lab.compiler import find_compiler

CUPTI = r"""
#include <stdint.h>
typedef void Told(void *, int, uint32_t, const void *);
static Told *told;
static char enabled[4][1024];
int cuptiSubscribe(void **subscriber, Told *callback, void *user) { told = callback; return 0; }
int cuptiEnableCallback(uint32_t on, void *subscriber, int domain, uint32_t what) {
    enabled[domain][what] = on;
    return 0;
}
void made_up_event(int domain, uint32_t what, const void *about) {
    if (told && enabled[domain][what]) told(0, domain, what, about);
}
"""
WORK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void nobody(int domain, uint32_t what, const void *about) {}
static void (*event)(int, uint32_t, const void *) = nobody;
static char *read_all(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    if (!f) { fprintf(stderr, "no %s\n", path); exit(3); }
    fseek(f, 0, SEEK_END), *size = ftell(f), rewind(f);
    char *data = malloc(*size + 1);
    if (fread(data, 1, *size, f) != *size) exit(3);
    return data;
}
int main(int n, char **words) {
    const char *injection = getenv("CUDA_INJECTION64_PATH");
    if (injection) {
        void *library = dlopen(injection, RTLD_NOW | RTLD_GLOBAL);
        int (*begin)(void) = library ? dlsym(library, "InitializeInjection") : 0;
        if (!begin || !begin()) fprintf(stderr, "not injected\n");
        void *found = dlsym(RTLD_DEFAULT, "made_up_event");
        if (found) event = (void (*)(int, uint32_t, const void *))found;
    }
    size_t held;
    char *library = read_all(words[1], &held);
    printf("began %s\n", getenv("CUDA_MODULE_LOADING") ? "as told" : "as usual"), fflush(stdout);
    unsigned sum = 0;
    for (int i = 2; i + 1 < n; i += 2) {
        size_t size;
        char *cubin = read_all(words[i], &size);
        int error = 209;
        struct { int site; const char *function; const void *arguments; void *result; const char *symbol; } call = {
            0, "f", 0, &error, words[i + 1]};
        if (!memmem(library, held, cubin, size)) {
            call.site = 1, event(2, 211, &call);
            fprintf(stderr, "RuntimeError: CUDA error: invalid device ordinal\n");
            return 1;
        }
        struct { uint32_t id; size_t size; const char *cubin; } module = {i, size, cubin};
        struct { void *c, *h, *d; } resource = {0, 0, &module};
        event(3, 6, &resource);
        event(1, 307, &call), error = 0, call.site = 1, event(1, 307, &call), event(2, 211, &call);
        for (size_t k = 0; k < size; k++) sum = sum * 31 + (unsigned char)cubin[k];
    }
    printf("sum %u\n", sum);
    return 0;
}
"""


def environment(folder):
    """Make it: two libraries with device code, one without, a program, a package, links. Returns the folder."""
    folder = Path(folder)
    for name in ("bin", "lib", "cubins", "packages/some"):
        (folder / name).mkdir(parents=True)
    fatbin.library(folder / "lib/libfirst.so", [fatbin.container(parts()) for _ in range(3)], ANSWER, gap=100)
    fatbin.library(
        folder / "lib/libsecond.so.1", [fatbin.container(parts()[:-1], "zstd")], "int two(void) { return 2; }"
    )
    fatbin.library(folder / "lib/libnone.so", [], "int three(void) { return 3; }")
    for arch, image in cubins().items():
        (folder / "cubins" / f"{arch}.cubin").write_bytes(image)
    build(folder / "lib/libcupti.so.13", CUPTI, "-shared", "-fPIC")
    build(folder / "bin/work", WORK, "-ldl")
    (folder / "packages/some/__init__.py").write_text("x = 1\n")
    (folder / "bin/script").write_text(f"#!{folder}/bin/python\nprint('{folder}')\n")
    (folder / "bin/script").chmod(0o755)
    (folder / "lib64").symlink_to("lib")
    (folder / "lib/round").symlink_to(folder)  # a circle
    (folder / "lib/libsecond.so").symlink_to("libsecond.so.1")
    (folder / "bin/outside").symlink_to("/bin/sh")
    return folder


ANSWER = "int answer = 42; static int zeros[99999]; int *where(void) { return zeros; } int one(void) { return 1; }"


def build(path, source, *flags):
    command = [*find_compiler(), "-O1", "-x", "c", "-", "-o", str(path), *flags]
    subprocess.run(command, input=source, text=True, check=True)
