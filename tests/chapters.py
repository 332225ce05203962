"""Which tests belong to which chapter, for `make test CHAPTER=07`.

    python tests/chapters.py 07     the files: the chapter's notebook, its exercises, its tests
    python tests/chapters.py ""     none, which is to say all

A file of tests that is new is entered below; test_suite.py fails until it is.
"""

import sys
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "exercises", "solutions")

# Names in tests/, without test_ and .py. A file may belong to several chapters.
TESTS = {
    "01": "exercises_roofline ref",
    "02": "cpu_gemv cpu_matmul exercises_cpu_matmul lab_cache lab_compiler ref",
    "03": "exercises_first_cuda_kernel gemv gemv_gpu ref",
    "04": "exercises_warp_gemv gemv gemv_bench gemv_gpu gemv_unaligned lab_plots_cuda",
    "05": "exercises_fusion fusion* lab_plots_fusion ref_fusion",
    "06": "exercises_lowbit_weights lowbit* lab_plots_lowbit ref_lowbit",
    "07": "exercises_attention_mix attention_mix* kv_cache_rungs* lab_plots_attention ref_attention",
    "08": "exercises_flash_decoding attention_bench attention_[dpr]* lab_plots_attention ref_scheduling",
    "09": "exercises_kv_quantization kv_cache* attention_bench lab_plots_attention ref_kv_cache",
    "10": "exercises_paged_attention lab_plots_paging lab_plots_serving paged* ref_paged ref_scheduling",
    "11": "exercises_ssd_math lab_plots_ssd ref_ssd",
    "12": "exercises_five_kernels ssd_five* ssd_float32* ssd_stack* ssd_dropin ssd_bench",
    "13": "exercises_one_launch lab_plots_order lab_triton_on_simt ssd_rungs* ssd_orderings ssd_bench",
    "14": "exercises_matmul lab_plots_matmul matmul*",
    "15": "exercises_fused_ssd lab_plots_fused ssd_fused* ssd_shares ssd_bench ssd_studies",
    "16": "exercises_latent_attention lab_plots_latent latent* ref_latent_attention",
    "17": "cpu_llm exercises_llm lab_law lab_plots_llm lab_plots_serving llm_* models_* ref_llm",
    "18": "cpu_mamba2 exercises_mamba2 lab_plots_mamba2 mamba2_* models_* ref_mamba2",
    "19": "collective* exercises_across_gpus lab_devices lab_plots_link",
    "20": "exercises_in_your_torch fatbin lab_plots_slim slim*",
    "21": "exercises_training ref_ssd_backward ssd_backward* ssd_gradients* ssd_training_step models_small",
}
HOUSE = """
    arm bench_run book compiling copies every_card exercises_costs forked_kernels house imports lab_as_called
    lab_card lab_check lab_cuda lab_cuda_gpu lab_cuda_timing lab_interpreter lab_ladder
    lab_misc lab_prepared* lab_results lab_source lab_table lab_tensor_map* lab_timing_roof mutations
    notebook_tools notebooks offsets operators* readme roof_cuda simt_* suite trials wheel
"""  # what all chapters stand on


def files_of(chapter):
    """The files of a chapter ("07" or "7"), as pytest takes them from the course's folder; SystemExit for another."""
    number = chapter.zfill(2)
    if number not in TESTS:
        raise SystemExit(
            f"make test expected CHAPTER to be one of {', '.join(TESTS)} and found {chapter!r}: "
            "name one of them, or none to test all"
        )
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob(f"{number}_*.ipynb"))]
    found += [path for path in sorted((ROOT / "tests").glob("test_*.py")) if belongs(path, TESTS[number])]
    return [path.relative_to(ROOT).as_posix() for path in found]


def belongs(path, patterns):
    """Whether a file of tests has one of these names."""
    return any(fnmatchcase(path.stem, f"test_{pattern}") for pattern in patterns.split())


if __name__ == "__main__":
    chapter = "".join(sys.argv[1:]).strip()
    if chapter:
        print(*files_of(chapter))
