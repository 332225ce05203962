/* The numbers of x, W and y: compile with DTYPE. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE __nv_bfloat16 /* or __half */
#endif
using T = DTYPE;
