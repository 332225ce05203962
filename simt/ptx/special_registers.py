"""The special registers that a kernel may read, such as %tid: their names without the axis."""

GRID_BARRIER = ("envreg2", "envreg1")  # low and high half of its address, for grid.sync() of cooperative groups
SPECIALS = {"ntid", "nctaid", "tid", "ctaid", "laneid", "warpid", "nwarpid", "dynamic_smem_size", "total_smem_size",
            "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge",
            "clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo",
            "smid", "nsmid", "gridid", "cluster_ctarank", "clusterid", "cluster_ctaid",
            "cluster_nctarank", "cluster_nctaid", "nclusterid", *GRID_BARRIER}  # fmt: skip
